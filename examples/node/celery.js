// Celery's messages: the bytes of a task, and what is in those that Celery sends.
"use strict";
const zlib = require("zlib");

/** A message for a Celery worker, as the body of a put; its id is the task's. */
function celeryTask(queue, id, task, args = [], kwargs = {}, headers = {}) {
  const h = { lang: "js", task, id, root_id: id, parent_id: null, group: null, retries: 0, eta: null,
    expires: null, timelimit: [null, null], argsrepr: JSON.stringify(args),
    kwargsrepr: JSON.stringify(kwargs), origin: "node", ...headers };
  const p = { correlation_id: id, delivery_mode: 2, priority: 0,
    delivery_info: { exchange: "", routing_key: queue } };
  const body = [args, kwargs, { callbacks: null, errbacks: null, chain: null, chord: null }];
  const line = JSON.stringify({ h, p, t: "application/json", e: "utf-8" });
  // The line is ASCII, as Python writes it; the body is what the content type says.
  const ascii = line.replace(/[^\0-\x7e]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return Buffer.from(`${ascii}\n${JSON.stringify(body)}`);
}

/** {headers, properties, contentType, contentEncoding, body} of a Celery message that was popped. */
function readEnvelope(protocol, data, id) {
  if (data[0] !== 0x7b) {
    const preset = [Buffer.from(protocol.dictionary)];
    if (data[0] === 2) preset.push(Buffer.from(id).subarray(0, data[1]));
    else if (data[0] !== 1) throw new Error(`unknown form of an envelope: ${data[0]}`);
    data = zlib.inflateRawSync(data.subarray(data[0]), { dictionary: Buffer.concat(preset) });
  }
  const end = data.indexOf("\n");
  const { h: headers, p: properties, t: contentType, e: contentEncoding } = JSON.parse(data.toString("utf8", 0, end));
  return { headers, properties, contentType, contentEncoding, body: data.subarray(end + 1) };
}

module.exports = { celeryTask, readEnvelope };
