-- Makes one process the one that speaks for some topics, or tells that another does.
--
-- KEYS who speaks, per topic
-- ARGV[1] name of the process   ARGV[2] milliseconds for which it does
-- Returns, per topic: 1 it does | 0 another does

local answers = {}
for i = 1, #KEYS do
  local speaker = redis.call('GET', KEYS[i])
  if not speaker or speaker == ARGV[1] then
    -- Redis refuses what takes memory when it is full, but not after a script's first write.
    redis.call('DEL', KEYS[i])
    redis.call('SET', KEYS[i], ARGV[1], 'PX', ARGV[2])
    answers[i] = 1
  else
    answers[i] = 0
  end
end
return answers
