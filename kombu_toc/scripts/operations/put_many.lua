-- Adds messages of one slot and one priority step, each as put.lua does, in their order.
--
-- KEYS[1] store   KEYS[2] body   KEYS[3] armed   KEYS[4] the producer's latest calls
-- KEYS[5] tokens; then the topic's put-pace, if puts are limited; then lanes, turns and waits, where keys
-- take turns; then the slot's log, if the topic has logs; then the wake index, if it is on this node
-- ARGV[1] slot number   ARGV[2] milliseconds after which the slot goes away unless something is put
--         again, or 0
-- ARGV[3] how many values a message has: 3, 4 or 5; behind it, where keys take turns and what is due at
--         once goes to its lane, 'f', the number of the priority step, from 1, and a comma; behind that,
--         if puts are limited, how many may be put, as toll.lua has it
-- ARGV[4] name of this call; or '' if messages are put back that may be there: then it is not
--         remembered, and the same bytes under an id are the same message   ARGV[5] seconds it is; if
--         the topic has logs, a comma and how many entries the slot's log may have: what is added is logged
-- ARGV[6...] per message: its id, its envelope, its action time in microseconds, '+N' for N
--         microseconds from now, or '' for now; its traits as token.lua has them, or ''; and of what is put
--         back, the suffix under which it may be there as a copy
-- Returns {now in microseconds, which were there already, which were not added because another
--          message has their id, announcements, settled}; which: their numbers, from 0. If puts are
--          limited, before the last two: {number, microseconds until it may be put, 'p' for the whole
--          topic or 'P' for its key, ...} of those that were not added for that
--
-- A copy is recorded in a key of its id, which this script does not have: the caller adds it with
-- put.lua. No two messages of a call have one id. A server that is full refuses the whole call.
-- A call that is repeated because its reply was lost adds nothing, whatever has become of its
-- messages; it is remembered only if it added all that was not there.
--@ clock admitted wake spread toll log push

local store, body, armed, sent = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local tokens, ttl, width = KEYS[5], tonumber(ARGV[2]), math.max(3, tonumber(string.sub(ARGV[3], 1, 1)))
local step, limits = string.match(ARGV[3], '^%df(%d+),(.*)$')
step, limits = tonumber(step or ''), limits or string.sub(ARGV[3], 2)
local limited = limits ~= ''
local pace, behind = KEYS[6], limited and 7 or 6
local lanes, turns, waits = KEYS[behind], KEYS[behind + 1], KEYS[behind + 2]
if step then behind = behind + 3 end
local remember, most = string.match(ARGV[5], '^(%d+),?(%d*)$')
local log = most ~= '' and KEYS[behind]
local wake = KEYS[log and behind + 1 or behind]
local name, known = ARGV[4], ARGV[4] ~= '' and redis.call('GET', KEYS[4]) or ';'
local repeated = name ~= '' and string.find(known, ';' .. name .. ';', 1, true)
local now = clock()

-- First what writes nothing: a user who may not run one of these commands leaves nothing half done.
local there, taken, new, refused, paid = {}, {}, {}, {}, {}
for i = 6, #ARGV, width do
  local id, envelope = ARGV[i], ARGV[i + 1]
  local which = new
  if repeated then
    which = there
  elseif width == 5 and redis.call('HEXISTS', body, id .. '#' .. ARGV[i + 4]) == 1 then
    which = there
  elseif redis.call('HEXISTS', body, id) == 1 then
    local same = name == '' and redis.call('HSTRLEN', body, id) == #envelope
      and redis.call('HGET', body, id) == envelope
    local own = same and width > 3 and string.match(ARGV[i + 3], '[;,]n(%x+)')
    if own then same = string.match(redis.call('HGET', tokens, id) or '', '[;,]n(%x+)') == own end
    which = same and there or taken
  end
  local wait, limit = 0, ''
  if limited and which == new then wait, limit = toll(limits, pace, key_in(ARGV[i + 3]), now, paid) end
  if wait == 0 then
    which[#which + 1] = (i - 6) / width
  else
    push(refused, (i - 6) / width, wait, limit)
  end
end

local latest, score, earliest -- of the message before: its action time and its score
local bodies, scores = {}, {} -- to be written together
for n = 1, #new do
  local i = width * new[n] + 6
  local id, when, us = ARGV[i], ARGV[i + 2], now
  if when ~= '' then
    us = tonumber(when)
    if string.byte(when) == 43 then us = now + us end
    if us < now then us = now end
  end
  -- Right behind the one before, if that has the same time: nothing has come between them.
  if us == latest and score % 1000 < 999 then
    score = score + 1
  else
    in_parts('ZADD', store, scores)
    scores = {}
    score = free_score(store, us == now and due_score(now) or action_score(us),
      step or width > 3 and key_in(ARGV[i + 3]) ~= '')
  end
  latest = us
  bodies[2 * n - 1], bodies[2 * n] = id, ARGV[i + 1]
  if width > 3 and ARGV[i + 3] ~= '' then
    redis.call('HSET', tokens, id, ARGV[i + 3])
  elseif ttl > 0 then -- a token may outlive its body where slots go away by themselves
    redis.call('HDEL', tokens, id)
  end
  if step and us == now and score - due_score(now) < 5000 then -- no more than 5 ms later
    enter_lane(store, lanes, turns, waits, step, score, width > 3 and key_in(ARGV[i + 3]) or '', id)
  else
    scores[#scores + 1], scores[#scores + 2] = string.format('%d', score), id
  end
  if log then log_change(log, tonumber(most), 'p', id) end
  us = math.max(us, action_time(score))
  if not earliest or us < earliest then earliest = us end
end
in_parts('ZADD', store, scores)
in_parts('HSET', body, bodies)

-- As many as leave together, and more; the oldest are cut.
local whole = #taken == 0 and #refused == 0 and not repeated
local names = string.sub(whole and ';' .. name .. known or known, 1, 2000)
if earliest then
  if limited then pay(limits, pace, now, paid) end
  if name ~= '' then redis.call('SET', sent, names, 'EX', remember) end
  announce_if_first(wake, armed, ARGV[1], earliest, now)
  if ttl > 0 then
    for i = 1, 3 do
      if redis.call('PTTL', KEYS[i]) < ttl then redis.call('PEXPIRE', KEYS[i], ttl) end
    end
    if wake and redis.call('PTTL', wake) < ttl then redis.call('PEXPIRE', wake, ttl) end
  end
else
  -- Something is written, so that WAIT waits for what was added before; first what takes no memory,
  -- because Redis refuses what does when it is full, but not after a script's first write.
  redis.call('PERSIST', sent)
  redis.call('SET', sent, names, 'EX', math.max(1, tonumber(remember)))
  if name == '' then redis.call('DEL', sent) end
end
if limited then return {now, there, taken, refused, said, unsaid} end
return {now, there, taken, said, unsaid}
