// What the tests have the client in Node.js do: a call a line, as JSON, and a reply a line.
"use strict";
const fs = require("fs");
const path = require("path");
const readline = require("readline");

const [folder, file, address, cluster] = process.argv.slice(2);
const { TimeoutCenter } = require(path.join(folder, "toc.js"));
const { celeryTask, readEnvelope } = require(path.join(folder, "celery.js"));
const protocol = JSON.parse(fs.readFileSync(file));
const center = new TimeoutCenter(protocol, address, { cluster: cluster === "cluster" });

const calls = {
  ...Object.fromEntries(
    ["topic", "put", "pop", "wait", "ack", "extend", "receipt", "cancel"].map((name) => [name, (...args) => center[name](...args)]),
  ),
  send: (topic, id, task, args, options) => center.put(topic, id, celeryTask(topic.name, id, task, args), options),
  read: ({ id, body }) => {
    const { body: text, ...rest } = readEnvelope(protocol, Buffer.from(body), id);
    return { ...rest, body: JSON.parse(text) };
  },
};

readline.createInterface({ input: process.stdin }).on("line", async (line) => {
  const [name, ...args] = JSON.parse(line);
  let reply;
  try {
    reply = { ok: await calls[name](...args) };
  } catch (error) {
    reply = { error: error.message };
  }
  console.log(JSON.stringify(reply));
}).on("close", () => center.close());
