// What the page does in a browser: it looks again at its live parts, counts down, and knows keys.
// Everything else is links and forms, which work without it.
"use strict";
(() => {
  const $$ = (what, of = document) => [...of.querySelectorAll(what)];
  let ahead = 0; // of this machine's clock, in microseconds

  const clock = (root) => {
    const now = Number(root.body.dataset.now);
    if (now) ahead = Date.now() * 1000 - now;
  };

  const span = (seconds) => {
    if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
    const said = [];
    let left = Math.floor(seconds);
    for (const [size, name] of [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]) {
      if (left >= size) {
        said.push(`${Math.floor(left / size)} ${name}`);
        left %= size;
      } else if (said.length) break;
      if (said.length === 2) break;
    }
    return said.join(" ");
  };

  const pad = (number) => String(number).padStart(2, "0");
  const local = (moment) =>
    `${moment.getFullYear()}-${pad(moment.getMonth() + 1)}-${pad(moment.getDate())} ` +
    `${pad(moment.getHours())}:${pad(moment.getMinutes())}:${pad(moment.getSeconds())}`;

  // Times are shown in the zone of who looks; what is pointed at says them in UTC.
  const times = (root) => {
    for (const one of $$("time[data-us]", root)) {
      const moment = new Date(Number(one.dataset.us) / 1000);
      if (isNaN(moment)) continue;
      one.title = one.textContent;
      one.textContent = local(moment);
    }
  };

  const tick = () => {
    const now = Date.now() * 1000 - ahead;
    for (const one of $$(".away[data-us]")) {
      const away = (Number(one.dataset.us) - now) / 1e6;
      const said = away > 0 ? `in ${span(Math.max(Math.round(away), 1))}`
        : away > -0.5 ? "now" : `${span(Math.round(-away))} ago`;
      if (one.textContent !== said) one.textContent = said;
    }
  };

  // A part that somebody is at is left alone until they are done.
  const busy = (part) => {
    const at = document.activeElement;
    if (at && part.contains(at) && /^(INPUT|SELECT|TEXTAREA)$/.test(at.tagName) && at.type !== "checkbox") return true;
    const chosen = getSelection();
    return !chosen.isCollapsed && part.contains(chosen.anchorNode);
  };

  const seen = new Map(); // id -> the HTML that is shown, but for what counts by itself
  const html = (part) => part.outerHTML.replace(/(class="away"[^>]*>)[^<]*/g, "$1");

  const swap = (part, fresh) => {
    const said = html(fresh);
    if (seen.get(part.id) === said || busy(part)) return;
    seen.set(part.id, said);
    const checked = new Set($$("input:checked", part).map((one) => one.value));
    const open = new Set($$("details[open][id]", part).map((one) => one.id));
    const at = document.activeElement;
    const place = at && part.contains(at) ? at.getAttribute("href") || at.value || at.name : null;
    for (const one of $$("input[type=checkbox]", fresh)) one.checked = checked.has(one.value);
    for (const one of $$("details[id]", fresh)) one.open = open.has(one.id);
    const row = $$("tr.here a.open", part)[0];
    times(fresh);
    part.replaceWith(fresh);
    if (place !== null) {
      const again = $$("a, button, input, summary", fresh).find(
        (one) => (one.getAttribute("href") || one.value || one.name) === place);
      if (again) again.focus({ preventScroll: true });
    }
    if (row) {
      const again = $$("a.open", fresh).find((one) => one.getAttribute("href") === row.getAttribute("href"));
      if (again) again.closest("tr").classList.add("here");
    }
    chosen();
  };

  const trouble = (text) => {
    const part = document.getElementById("trouble");
    if (!part) return;
    const said = document.createElement("p");
    said.className = "trouble";
    said.setAttribute("role", "alert");
    said.textContent = text;
    part.replaceChildren(said);
    seen.delete("trouble");
  };

  let failures = 0;

  const look = async () => {
    try {
      const answer = await fetch(location.href, {
        headers: { "x-toc-live": "1" }, cache: "no-store", signal: AbortSignal.timeout(10000),
      });
      if (answer.redirected) return location.reload();
      const text = await answer.text();
      const fresh = new DOMParser().parseFromString(text, "text/html");
      if (answer.status === 401) return location.reload();
      clock(fresh);
      const parts = answer.ok ? $$("[data-live]") : $$("#trouble");
      for (const part of parts) {
        const other = fresh.getElementById(part.id);
        if (other) swap(part, document.adoptNode(other));
      }
      const every = fresh.body.dataset.every;
      if (answer.ok && every === undefined) delete document.body.dataset.every;
      else if (answer.ok) document.body.dataset.every = every;
      failures = 0;
    } catch {
      failures += 1;
      trouble("This page's server does not answer; it is tried again.");
    }
    next();
  };

  const next = () => {
    const every = Number(document.body.dataset.every);
    if (!every) return;
    setTimeout(() => (document.hidden ? waiting() : look()), every * Math.min(1 + failures, 5));
  };

  const waiting = () => document.addEventListener("visibilitychange", look, { once: true });

  // Boxes: one chooses all; buttons that need a choice say how many there are.
  const boxed = 'input[name="id"], input[name="id*"]'; // with a star, its value is percent-encoded
  const chosen = () => {
    for (const form of $$("form[data-chooses]")) {
      const boxes = $$(boxed, form);
      const number = boxes.filter((one) => one.checked).length;
      for (const one of $$("[data-chosen]", form)) one.textContent = number ? `${number} chosen` : "none chosen";
      for (const one of $$("button[data-needs]", form)) one.disabled = !number;
      for (const one of $$(".sticky", form)) one.classList.toggle("none", !number);
      const all = form.querySelector("input[data-all]");
      if (all) {
        all.hidden = false;
        all.checked = number > 0 && number === boxes.length;
        all.indeterminate = number > 0 && number < boxes.length;
      }
    }
  };

  document.addEventListener("change", (event) => {
    if (event.target.matches("input[data-all]")) {
      for (const one of $$(boxed, event.target.form)) one.checked = event.target.checked;
    }
    chosen();
  });

  // -- keys

  const help = () => {
    let box = document.getElementById("help");
    if (!box) {
      box = document.createElement("dialog");
      box.id = "help";
      const list = document.createElement("dl");
      for (const [key, what] of [
        ["j, k", "the next row, the one before"], ["Enter", "open the row"], ["x", "choose the row"],
        ["/", "to the filters"], ["g o", "overview"], ["g d", "dead letters"], ["g l", "limits"],
        ["g s", "schedules"], ["g b", "library"], ["g a", "audit log"],
        ["g f", "failures"], ["g j", "jobs"], ["?", "these keys"],
      ]) {
        const row = document.createElement("div");
        for (const [tag, text] of [["dt", key], ["dd", what]]) {
          const made = document.createElement(tag);
          made.textContent = text;
          row.append(made);
        }
        list.append(row);
      }
      const close = document.createElement("button");
      close.textContent = "Close";
      close.addEventListener("click", () => box.close());
      box.append(list, close);
      document.body.append(box);
    }
    box.showModal();
  };

  const step = (by) => {
    const rows = $$("tbody tr").filter((row) => row.querySelector("a"));
    if (!rows.length) return;
    const at = rows.findIndex((row) => row.classList.contains("here"));
    const to = at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + by, 0), rows.length - 1);
    if (at >= 0) rows[at].classList.remove("here");
    rows[to].classList.add("here");
    rows[to].scrollIntoView({ block: "nearest" });
  };

  const places = { o: "./", d: "dead", f: "failures", j: "jobs", l: "limits", s: "schedules",
    b: "library", a: "audit" };
  let going = 0;

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox") {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (Date.now() - going < 1500 && places[event.key]) {
      const to = $$("nav a").find((one) => one.getAttribute("href") === places[event.key]);
      if (to) to.click();
      return;
    }
    going = event.key === "g" ? Date.now() : 0;
    const here = document.querySelector("tr.here");
    if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
    else if (event.key === "Enter" && here && event.target === document.body) here.querySelector("a.open, a").click();
    else if (event.key === "x" && here) {
      const box = here.querySelector("input[type=checkbox]");
      if (box) box.click();
    } else if (event.key === "?") help();
    else if (event.key === "/") {
      const first = document.querySelector("form.filters input:not([type=hidden])");
      const unfold = document.getElementById("unfold");
      if (unfold) unfold.checked = true;
      if (first) { event.preventDefault(); first.focus(); }
    }
  });

  clock(document);
  for (const part of $$("[data-live]")) seen.set(part.id, html(part));
  times(document);
  chosen();
  tick();
  setInterval(tick, 1000);
  next();
})();
