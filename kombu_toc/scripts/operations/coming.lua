-- Counts the waiting messages of a slot that are due by each of some times. Nothing is scanned:
-- O(log n) for each time.
--
-- KEYS store (one per priority step)
-- ARGV[1...] times, in microseconds from now
-- Returns how many are due by the first time, by the second, ...
--@ clock

local now, counts = clock(), {}
for i = 1, #ARGV do counts[i] = 0 end
for key = 1, #KEYS do
  if redis.call('EXISTS', KEYS[key]) == 1 then
    for i = 1, #ARGV do
      counts[i] = counts[i] + redis.call('ZCOUNT', KEYS[key], '-inf', due_score(now + tonumber(ARGV[i])))
    end
  end
end
return counts
