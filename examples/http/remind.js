// node remind.js [URL]: puts ten messages that are due within two seconds, and handles them. One of
// them fails at first.
"use strict";

const { Queue, Problem } = require("./toc");

async function main() {
  const url = process.argv[2] || "http://localhost:8088";
  const queue = new Queue("reminders", { url, token: process.env.TOC_TOKEN });
  for (let order = 0; order < 10; order++) {
    await queue.put({ order }, { id: `order-${order}`, delay: order / 5 });
  }
  await queue.put({ order: 10 }, { id: "order-10", delay: 3600 });
  await queue.reschedule("order-10", { delay: 7200 });
  await queue.cancel("order-10");
  try {
    await queue.get("order-10");
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    console.log(`order-10: ${error.status}`);
  }
  const done = new Set();
  let failed = false;
  const stop = new AbortController();
  await queue.consume(
    async (task) => {
      const { order } = JSON.parse(task.text);
      if (order === 3 && !failed) {
        failed = true;
        throw new Error("not yet");
      }
      done.add(order);
      console.log(`${task.id}: ${task.failures} failures`);
      if (done.size === 10) stop.abort();
    },
    { signal: stop.signal, visibility: 30 },
  );
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
