// Reminds of an order that is not paid: node remind.js protocol.json localhost:6379
"use strict";
const fs = require("fs");
const { TimeoutCenter } = require("./toc.js");

async function main(file, address = "localhost:6379") {
  const center = new TimeoutCenter(JSON.parse(fs.readFileSync(file)), address);
  const topic = await center.topic("node-reminders");
  await center.put(topic, "order-41", "order 41", { delay: 1 });
  await center.put(topic, "order-42", "order 42", { delay: 1 });
  await center.cancel(topic, "order-41"); // it was paid
  const messages = await center.wait(topic, 5);
  for (const { body } of messages) console.log(`reminded: ${body}`);
  await center.ack(topic, messages);
  center.close();
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(error.message);
  process.exit(1);
});
