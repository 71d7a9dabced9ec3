// A connection that speaks Redis's protocol, without dependencies.
"use strict";
const net = require("net");
const tls = require("tls");

/** A connection that speaks Redis's protocol; replies are Buffers, numbers, arrays and null. */
class Connection {
  /** secure: true, or what `tls.connect` takes, for a server that speaks TLS */
  constructor(address, { secure, username = "default", password } = {}) {
    const [, host, port] = /^(.*):(\d+)$/.exec(address);
    this.waiting = [];
    this.rest = Buffer.alloc(0);
    const to = { host, port: Number(port) };
    this.socket = secure ? tls.connect({ ...secure, ...to }) : net.connect(to);
    this.socket.on("data", (data) => this.#read(data));
    for (const end of ["error", "close"]) this.socket.on(end, (error) => this.#end(error));
    if (password) this.send("AUTH", username, password).catch((error) => this.#end(error));
  }
  send(...parts) {
    if (this.error) return Promise.reject(this.error);
    const packed = parts.flatMap((part) => {
      const bytes = Buffer.isBuffer(part) ? part : Buffer.from(String(part));
      return [Buffer.from(`$${bytes.length}\r\n`), bytes, Buffer.from("\r\n")];
    });
    this.socket.write(Buffer.concat([Buffer.from(`*${parts.length}\r\n`), ...packed]));
    return new Promise((resolve, reject) => this.waiting.push({ resolve, reject }));
  }
  close() {
    this.socket.destroy();
  }
  #end(error) {
    this.error ??= error instanceof Error ? error : new Error("the connection has ended");
    for (const one of this.waiting.splice(0)) one.reject(this.error);
  }
  #read(data) {
    this.rest = Buffer.concat([this.rest, data]);
    for (let found; this.waiting.length && (found = parse(this.rest, 0)); ) {
      this.rest = this.rest.subarray(found.next);
      const { resolve, reject } = this.waiting.shift();
      found.value instanceof Error ? reject(found.value) : resolve(found.value);
    }
  }
}

/** {value, next} of the reply that begins there; undefined if it has not come whole. */
function parse(bytes, at) {
  const end = bytes.indexOf("\r\n", at);
  if (end < 0) return undefined;
  const line = bytes.toString("utf8", at + 1, end), count = Number(line);
  let next = end + 2;
  switch (String.fromCharCode(bytes[at])) {
    case "+": return { value: line, next };
    case "-": return { value: new Error(line), next };
    case ":": return { value: count, next };
    case "$":
      if (count < 0) return { value: null, next };
      if (bytes.length < next + count + 2) return undefined;
      return { value: Buffer.from(bytes.subarray(next, next + count)), next: next + count + 2 };
  }
  if (count < 0) return { value: null, next };
  const value = [];
  for (let number = 0; number < count; number++) {
    const item = parse(bytes, next);
    if (!item) return undefined;
    value.push(item.value);
    next = item.next;
  }
  return { value, next };
}

module.exports = { Connection };
