// A client of the timeout center, without dependencies: docs/protocol.md explains each step.
"use strict";
const { createHash, randomBytes } = require("crypto");
const { Connection } = require("./resp.js");

const utf8 = (bytes) => bytes.toString("utf8");
const ms = (seconds) => Math.trunc(seconds * 1000);
const us = (seconds) => Math.round(seconds * 1e6);
const suffixOf = (name) => createHash("sha256").update(name).digest("hex").slice(0, 16);
const outcomes = { 0: "repeated", 1: "added", 3: "kept", 4: "replaced" };
const stemOf = (id) => (id.includes("#") ? id.slice(0, id.lastIndexOf("#")) : id);

function crc32(text) {
  let crc = ~0;
  for (const byte of Buffer.from(text)) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc >>> 0;
}

/** The keys of a slot. */
function slotOf({ prefix, name, steps }, number) {
  const encoded = name.replace(/%/g, "%25").replace(/{/g, "%7B").replace(/}/g, "%7D");
  const stem = `${prefix}{${encoded}:${number}}:`;
  const stores = steps.map((step) => stem + (step ? `store:${step}` : "store"));
  const parts = ["armed", "prepare", "body", "dead", "reasons", "tokens"].map((part) => stem + part);
  return { number, stem, stores, parts, all: [...parts, ...stores] };
}

class TimeoutCenter {
  /**
   * protocol: what `python -m kombu_toc.scripts` writes
   * address: host:port, of one server or of a node of a Cluster; or rediss://user:password@host:port
   * prefix: `global_keyprefix`, and "toc:"
   * secure: what `tls.connect` takes, such as { ca }
   */
  constructor(protocol, address, { prefix = "toc:", cluster = false, secure } = {}) {
    if (protocol.protocol !== 1) throw new Error(`this client does not know protocol ${protocol.protocol}`);
    const url = new URL(address.includes("://") ? address : `redis://${address}`);
    const home = `${url.hostname}:${url.port || 6379}`;
    Object.assign(this, { protocol, prefix, cluster, home, nodes: {}, places: {} });
    const [username, password] = [url.username, url.password].map((part) => decodeURIComponent(part) || undefined);
    this.how = { secure: secure ?? url.protocol === "rediss:", username, password };
    this.name = randomBytes(9).toString("base64url");
    this.count = 0;
  }
  close() {
    for (const node of Object.values(this.nodes)) node.close();
  }

  // -- calls

  /** Run a command at the node that has this key. One that blocks has a connection of its own. */
  async command(key, ...parts) {
    const tag = /\{(.*?)\}/.exec(key)[1];
    const address = this.places[tag] ?? this.home;
    const name = parts[0].startsWith("B") ? `${address}/blocking` : address;
    if (!this.nodes[name] || this.nodes[name].error) this.nodes[name] = new Connection(address, this.how);
    try {
      return await this.nodes[name].send(...parts);
    } catch (error) {
      const moved = /^MOVED \d+ (\S+)/.exec(error.message);
      if (!moved) throw error;
      this.places[tag] = moved[1];
      return this.command(key, ...parts);
    }
  }
  async run(name, keys, args) {
    const { sha1, text } = this.protocol.scripts[name];
    try {
      return await this.command(keys[0], "EVALSHA", sha1, keys.length, ...keys, ...args);
    } catch (error) {
      if (!error.message.startsWith("NOSCRIPT")) throw error;
      return this.command(keys[0], "EVAL", text, keys.length, ...keys, ...args);
    }
  }
  /** Run a script that writes announcements. On a Cluster it returns them, and this writes them. */
  async announcing(topic, name, keys, args) {
    const wake = `${this.prefix}{toc}:wake:${topic.name}`;
    if (!this.cluster) return this.run(name, [...keys, wake], args);
    const reply = await this.run(name, keys, args);
    const [said, unsaid] = Array.isArray(reply) ? reply.slice(-2) : [[], []];
    const each = (flat, write) => flat.flatMap((slot, at) => (at % 2 ? [] : write(`${slot}:${flat[at + 1]}`, flat[at + 1])));
    const settled = each(unsaid, (time) => [time]), announced = each(said, (time, due) => [due, time]);
    if (settled.length) await this.command(wake, "ZREM", wake, ...settled);
    if (announced.length && topic.expires) await this.run("announce", [wake], [topic.expires, ...announced]);
    else if (announced.length) await this.command(wake, "ZADD", wake, ...announced);
    return reply;
  }
  /** Slots by what one call may name: on a Cluster, each by itself. */
  groups(numbers) {
    return this.cluster ? numbers.map((number) => [number]) : [numbers];
  }

  // -- operations

  /** Declare a topic, and return it as it was declared first. */
  async topic(name, limits = {}) {
    const wanted = { slots: 8, retries: 16, steps: [0, 3, 6, 9], bases: false, named: true, ...limits };
    const keys = ["topics", "expiring", "names"].map((key) => `${this.prefix}{toc}:${key}`);
    const raw = await this.run("declare", keys, [name, JSON.stringify(wanted), wanted.expires ?? 0]);
    const topic = { steps: [0, 3, 6, 9], visibility: 60, ...JSON.parse(utf8(raw)), name, prefix: this.prefix };
    return { ...topic, numbers: [...Array(Math.max(topic.slots, ...(topic.was ?? []))).keys()] };
  }

  /** Add a message; return the id that it is kept under, and the outcome: added, kept, replaced, repeated.
   * at: seconds since the epoch; delay: seconds from now; visibility, maxLease, expires: seconds;
   * ifExists: "keep" or "replace"; token: names this put for its caller, who may repeat it. */
  async put(topic, id, body, { at, delay, basis, priority = 0, ifExists, token, publish, ...own } = {}) {
    if (topic.bases === false && basis !== undefined && basis !== id)
      await this.run("admit", [`${this.prefix}{toc}:topics`], [topic.name, "bases"]);
    const slot = slotOf(topic, crc32(basis ?? id) % topic.slots);
    const step = Math.max(topic.steps.findLastIndex((one) => one <= priority), 0);
    const when = at !== undefined ? us(at) : delay > 0 ? `+${us(delay)}` : "";
    const traits = Object.entries({ v: own.visibility, m: own.maxLease, e: own.expires })
      .filter(([, value]) => value !== undefined).map(([letter, value]) => letter + ms(value));
    // Puts may be under way at the same time: each is a producer of its own.
    const name = token === undefined ? publish ?? `${this.name}.${++this.count}` : suffixOf(`${id}\0${token}`);
    const waits = at !== undefined ? at - Date.now() / 1000 : delay ?? 0;
    const known = token === undefined ? 60 : 3600 + Math.ceil(Math.max(waits, 0));
    const [armed, , bodies, dead, reasons, tokens] = slot.parts;
    const sent = `${slot.stem}sent:${token === undefined ? name : `=${name}`}`;
    const keys = [slot.stores[step], bodies, armed, `${slot.stem}copies:${id}`, sent];
    const args = [id, body, when, slot.number, token === undefined ? suffixOf(name) : name, topic.expires ?? 0];
    args.push(ifExists === "keep" ? 1 : 0, name, known, 0);
    if (traits.length || topic.expires) keys.push(tokens), args.push(traits.length ? `;${traits}` : "");
    let script = "put_special"; // "put" is for plain messages only, and faster
    if (ifExists === "replace") {
      script = "put_unique"; // without a unique key
      keys.unshift(`${slot.stem}claims`, dead, reasons, tokens, ...slot.stores);
      args.unshift(slot.stores.length, "", 0, 0, 0, "", "", "", 0);
    }
    const [kept, done] = await this.announcing(topic, script, keys, args);
    return { id: utf8(kept), outcome: outcomes[done] };
  }

  /** Take up to `limit` messages that are due. recover: roll back so many leases a slot that ended by
   * `until` (seconds since the epoch, by the server's clock); see docs/protocol.md. */
  async pop(topic, limit = 1, { visibility, slots = topic.numbers, recover = 0, until = 0 } = {}) {
    const found = [];
    for (const numbers of this.groups(slots)) {
      if (found.length >= limit) break;
      const some = numbers.map((number) => slotOf(topic, number));
      const name = `${this.name}.${++this.count}`;
      const { retry_backoff: wait = 0, retry_backoff_max: longest = 600 } = topic;
      const { dead_age: age = 604800, dead_limit: most = 100000, max_lease: lease = 0 } = topic;
      const terms = [visibility && "own", topic.dead_expired === false && "drop", lease && `m${ms(lease)}`,
        topic.message_ttl !== undefined && `t${topic.message_ttl}`].filter(Boolean).map((term) => `${term},`);
      const [now, , messages] = await this.announcing(topic, "pop",
        [...some.flatMap((slot) => slot.parts),
          ...topic.steps.flatMap((_, step) => some.map((slot) => slot.stores[step])),
          `${some[0].stem}sent:to:${this.name}`],
        [some.length, topic.steps.length, limit - found.length, 0, 0, 0,
          ms(visibility ?? topic.visibility), topic.retries, recover, ms(wait), ms(longest), ms(age),
          Math.ceil(most / topic.slots), 1, us(until), name, 0, 8000000, terms.join(""), ...numbers]);
      this.ahead = now / 1000 - Date.now(); // of the server's clock, in milliseconds
      for (let at = 0; at < messages.length; at += 5) {
        const [place, step, raw, score, body] = messages.slice(at, at + 5);
        const [id, token] = Array.isArray(raw) ? raw.map(utf8) : [utf8(raw), name];
        const left = score % 1000 < 32 ? score % 1000 : topic.retries;
        found.push({ id, body, token, score, step, slot: numbers[place], left, lease: 32 * step + left });
      }
    }
    return found;
  }

  /** As pop, but wait up to so many seconds until something is due. Nothing is asked meanwhile. */
  async wait(topic, seconds, limit = 1, options = {}) {
    const wake = `${this.prefix}{toc}:wake:${topic.name}`;
    const until = Date.now() + 1000 * seconds;
    const claims = []; // of times that are announced: [slot number, microseconds]
    let found;
    while (!(found = await this.pop(topic, limit, options)).length && Date.now() < until) {
      for (;;) {
        const times = claims.map(([, due]) => due / 1000 - this.ahead).filter((due) => due > Date.now());
        const left = Math.ceil(Math.min(until, ...times) - Date.now());
        const claim = left > 0 && (await this.command(wake, "BZPOPMIN", wake, left / 1000));
        if (!claim) break; // the first of these times has come
        claims.push(utf8(claim[1]).split(":").map(Number));
        if (claims.at(-1)[1] / 1000 - this.ahead <= Date.now()) break;
      }
    }
    // Others shall wake for what has not passed; what has passed is settled, and is left out.
    for (const [number, due] of claims)
      await this.announcing(topic, "hand_back", [slotOf(topic, number).parts[0]], [number, due]);
    return found;
  }

  /** A text that names this delivery: ack and extend of the center in Python take it, too. */
  receipt(topic, { slot, step, id, score, token }) {
    const text = Buffer.from(JSON.stringify([topic.name, slot, step, id, score, topic.retries, token]));
    const sum = Buffer.alloc(4);
    sum.writeUInt32BE(crc32(text));
    return `toc1.${Buffer.concat([text, sum]).toString("base64url")}`;
  }

  /** Acknowledge messages; return how many there were. */
  async ack(topic, messages) {
    let count = 0;
    for (const numbers of this.groups([...new Set(messages.map((one) => one.slot))])) {
      const keys = [], args = [], sets = [], copies = [];
      for (const slot of numbers.map((number) => slotOf(topic, number))) {
        const some = messages.filter((one) => one.slot === slot.number);
        keys.push(...slot.all);
        args.push(slot.number, some.length, ...some.map(({ id }) => id), ...some.map(({ token }) => token));
        for (const { id } of some.filter(({ id }) => id.includes("#")))
          sets.push(`${slot.stem}copies:${stemOf(id)}`), copies.push(slot.number, id);
      }
      args.unshift(numbers.length, topic.steps.length, sets.length);
      const reply = await this.announcing(topic, "ack", [...keys, ...sets], [...args, ...copies]);
      count += reply[0] ?? reply; // of one message, it may be the number alone
    }
    return count;
  }

  /** Renew leases; return the messages whose leases have ended. */
  async extend(topic, messages, visibility) {
    const lost = [];
    for (const number of new Set(messages.map((one) => one.slot))) {
      const some = messages.filter((one) => one.slot === number);
      const [, prepare, , , , tokens] = slotOf(topic, number).parts;
      const args = [ms(visibility ?? topic.visibility), visibility ? 1 : 0];
      args.push(...some.flatMap(({ id, lease, token }) => [id, lease, token]));
      const ended = await this.run("extend", [prepare, tokens], args);
      lost.push(...ended.map((at) => some[Math.abs(at) - 1]));
    }
    return lost;
  }

  /** Delete waiting messages of this id, and copies that share it; return the ids. */
  async cancel(topic, id, { basis } = {}) {
    const picked = [topic.slots, ...(topic.was ?? []), ...(topic.formerly ?? [])].map(
      (count) => crc32(basis ?? stemOf(id)) % count);
    const numbers = basis !== undefined || topic.bases === false ? [...new Set(picked)] : topic.numbers;
    const deleted = [];
    for (const slot of numbers.map((number) => slotOf(topic, number))) {
      const sets = [id, stemOf(id)].map((one) => `${slot.stem}copies:${one}`);
      const rest = [`${slot.stem}claims`, `${slot.stem}log`, ...sets];
      const keys = [...slot.parts, ...slot.stores, ...rest];
      const args = [topic.steps.length, slot.number, 1, 0, 0, 1, 0, 0, id];
      const [found] = await this.announcing(topic, "cancel", keys, args);
      for (let at = 0; at < found.length; at += 6) if (found[at + 2]) deleted.push(utf8(found[at]));
    }
    return deleted;
  }
}

module.exports = { TimeoutCenter };
