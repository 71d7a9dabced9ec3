-- Deletes what is left of a slot without messages.
--
-- KEYS[1] body   KEYS[2...] the slot's other keys
-- Returns 1 deleted | 0 it has a message, and nothing is deleted

if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
for i = 2, #KEYS do redis.call('DEL', KEYS[i]) end
return 1
