// A client of celery-toc's HTTP API for Node.js 18 and later. It needs no packages.
//
//   const { Queue } = require("./toc");
//   const mail = new Queue("mail", { url: "http://localhost:8088", token: process.env.TOC_TOKEN });
//   await mail.put({ orderId: 7 }, { id: "order-7", delay: 3600 });
//   await mail.consume(async (task) => send(JSON.parse(task.text)));
"use strict";

const { randomUUID } = require("node:crypto");

/** What the server answers instead of what was asked for: `status`, `detail`, `field`. */
class Problem extends Error {
  constructor(problem, retryAfter) {
    super(problem.detail);
    Object.assign(this, problem, { retryAfter });
  }
}

class Queue {
  constructor(name, { url = "http://localhost:8088", token, attempts = 5 } = {}) {
    this.name = name;
    this.path = `${url}/v1/queues/${encodeURIComponent(name)}`;
    this.token = token;
    this.attempts = attempts;
  }

  /** Put a message: `body` is any JSON. Options: id, delay (seconds), scheduleTime, priority, ... */
  put(body, options = {}) {
    return this.ask("POST", "/tasks", { json: body, ...options });
  }

  /** Put many: each is { json, id, delay, ... }. */
  async putMany(tasks) {
    return (await this.ask("POST", "/tasks:batch", { tasks })).tasks;
  }

  get(id) {
    return this.ask("GET", `/tasks/${encodeURIComponent(id)}`);
  }

  cancel(id) {
    return this.ask("DELETE", `/tasks/${encodeURIComponent(id)}`);
  }

  reschedule(id, when) {
    return this.ask("POST", `/tasks/${encodeURIComponent(id)}:reschedule`, when);
  }

  async lease({ limit = 1, wait = 30, visibility } = {}) {
    return (await this.ask("POST", ":lease", { limit, wait, visibility })).tasks;
  }

  ack(...tasks) {
    return this.ask("POST", ":ack", { receipts: tasks.map((task) => task.receipt) });
  }

  extend(...tasks) {
    return this.ask("POST", ":extend", { receipts: tasks.map((task) => task.receipt) });
  }

  reject(task, error) {
    return this.ask("POST", ":reject", { receipts: [task.receipt], error: String(error) });
  }

  /** Handle messages until `signal` is aborted: each is acknowledged, or rejected if it throws.
   *  While one is handled, its lease is extended. */
  async consume(handle, { signal, limit = 10, visibility = 60 } = {}) {
    while (!signal?.aborted) {
      const tasks = await this.lease({ limit, visibility, wait: 5 });
      await Promise.all(tasks.map((task) => this.handleOne(task, handle, visibility)));
    }
  }

  async handleOne(task, handle, visibility) {
    const renew = setInterval(() => this.extend(task).catch(() => {}), (visibility * 1000) / 3);
    try {
      await handle(task);
      await this.ack(task);
    } catch (error) {
      await this.reject(task, error);
    } finally {
      clearInterval(renew);
    }
  }

  /** Send a request; what fails for a while is repeated, and is done once. */
  async ask(method, path, document) {
    const headers = { "content-type": "application/json", "idempotency-key": randomUUID() };
    if (this.token) headers.authorization = `Bearer ${this.token}`;
    const body = document === undefined ? undefined : JSON.stringify(document);
    for (let attempt = 1; ; attempt++) {
      let reply;
      try {
        reply = await fetch(this.path + path, { method, headers, body });
        const answer = await reply.json();
        if (reply.ok) return answer;
        const retryAfter = Number(reply.headers.get("retry-after") || 0);
        // With Retry-After, the same request may be repeated as it is.
        if (!retryAfter || attempt >= this.attempts) throw new Problem(answer, retryAfter);
        await new Promise((done) => setTimeout(done, retryAfter * 1000));
      } catch (error) {
        if (error instanceof Problem || attempt >= this.attempts) throw error;
        await new Promise((done) => setTimeout(done, 100 * 2 ** attempt));
      }
    }
  }
}

module.exports = { Queue, Problem };
