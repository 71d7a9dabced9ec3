-- Fragment: a part of put.lua and put_many.lua, where keys take turns: a message that is due at once goes
-- to its lane (lanes.lua), so that its key has a turn however many others wait. It has `store`, `id`,
-- `score`, `key`, `step`, and the keys `lanes`, `turns`, `waits`. The next pop finds out whether the key
-- may start something, and where its turn is.
redis.call('ZADD', store, score > 31 and -score or -score - 1, id)
redis.call('ZADD', lanes, 0, key .. '\0' .. string.format('%02d%016.0f', step, score) .. '\0' .. id)
if not redis.call('ZSCORE', waits, key) then redis.call('ZADD', turns, 'NX', score, key) end
