-- Adds a message of which more holds than put.lua knows: it has traits, it is added only if no other has
-- its id, it takes the place of one that was delivered; or its topic limits puts, has keys that take turns
-- or start in their order, or goes away by itself.
--
-- KEYS[1] store (of its priority step)   KEYS[2] body   KEYS[3] armed   KEYS[4] copies of the id
-- KEYS[5] the producer's latest publish
-- then tokens, if ARGV[11] is given, the topic's put-pace, if ARGV[12] is, and holders, if ARGV[13] is,
-- of this slot and of others that the key's messages were put into before; then lanes, turns and waits,
-- if ARGV[14] is; then the slot's log, if ARGV[15] is;
-- then the wake index, if it is on this node
-- ARGV[1] id        ARGV[2] envelope
-- ARGV[3] action time in microseconds, '+N' for N microseconds from now, or '' for now; 'T+N' for T,
--         if the sender is right in that there are N microseconds until then, else for '+N'
-- ARGV[4] slot number
-- ARGV[5] suffix that tells this message from another live one with the same id
-- ARGV[6] milliseconds after which the slot goes away unless something is put again, or 0
-- ARGV[7] 0: add; 1: add only if no live message has this id; 2: add, and what is put has a name of
--         its own in it: the same bytes under its id are the same message
-- ARGV[8] name of this put, or '' if it is not remembered   ARGV[9] seconds it is
-- then, left out as a rule:
-- ARGV[10] 1: add it although the server is full, for it takes the place of one that was delivered
-- ARGV[11] its traits as token.lua has them, or '' if it has none; left out as a rule. Where slots
--          go away by themselves it is given: a token may outlive its body there
-- ARGV[12] how many may be put, as toll.lua has it; left out as a rule; '' for any number
-- ARGV[13] how many holders: messages of a key start in their order, and this one goes on for the one of
--          its id, as the retry of a task does: if that holds its key, this one does from then on; 0 or
--          left out as a rule
-- ARGV[14] number of its priority step, from 1: keys take turns, and what is due at once goes to its
--          lane; 0 or left out as a rule
-- ARGV[15] how many entries the slot's log may have, if the topic has logs: it is logged that the message
--          was added; then ARGV[11] and ARGV[12] are given
-- Returns {id, -1, 0, microseconds until one more may be put, 'p' for the whole topic or 'P' for its key,
--          announcements, settled} if it may not be put now; else {id it is kept under, 1 added | 0 it was
--          there already: this put is repeated | 3 another message has its id, and was kept, now in
--          microseconds if it was added just now, else 0, announcements, settled}
--
-- What the producer put last is not added again, even if it has been acknowledged by now: it is the
-- same put, repeated because its reply was lost. A time that is earlier than everything the slot has
-- announced is announced. What may not be put changes nothing, and what was there already does not count.
-- Messages with one action time keep the order in which they were put, however many
-- there are: a millisecond holds 968 of them, the rest spills into the next ones, and each is less than
-- 1.4 ms late per 968 that have its time or one within those milliseconds.
--
-- A time that has passed is now: nobody could have delivered the message before it was put. So it
-- is late from now on, and it does not go before what has been due for longer.
--@ clock admitted wake spread toll log

local store, body, armed, copies, sent = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local traits, limits = ARGV[11], ARGV[12]
local ordered, step, most = tonumber(ARGV[13] or 0), tonumber(ARGV[14] or 0), tonumber(ARGV[15])
local wake, log = KEYS[6], nil
if traits then
  local place = limits and 8 + ordered + (step > 0 and 3 or 0) or 7
  if most then log, place = KEYS[place], place + 1 end
  wake = KEYS[place]
  if limits == '' then limits = nil end
end
local id, envelope, ttl = ARGV[1], ARGV[2], tonumber(ARGV[6])

local function keep(key) -- for as long as the slot, unless it is kept for longer already
  if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, ttl) end
end

local publish = ARGV[8]
local function there(outcome)
  local copy = id .. '#' .. ARGV[5]
  if outcome == 0 and redis.call('HEXISTS', body, copy) == 1 then id = copy end
  -- Something is written, so that WAIT waits for it; first what takes no memory, because Redis
  -- refuses what does when it is full, but not after a script's first write.
  redis.call('PERSIST', sent)
  redis.call('SET', sent, publish, 'EX', ARGV[9])
  if publish == '' or outcome ~= 0 then redis.call('DEL', sent) end
  return {id, outcome, 0, said, unsaid}
end

-- What goes away by itself, such as the replies to remote control, is taken by a full server too,
-- within bounds: the script's first write is this one.
if ARGV[10] == '1' or ttl > 0 and redis.call('ZCARD', store) < 100 then redis.call('PERSIST', sent) end
if publish ~= '' then
  local before = redis.pcall('SET', sent, publish, 'EX', ARGV[9], 'GET')
  if type(before) == 'table' then -- it is refused, as by a full server
    if redis.call('GET', sent) ~= publish then return before end
    before = publish
  end
  if before == publish then return there(0) end
end
if ARGV[7] == '1' then
  if redis.call('HEXISTS', body, id) == 1 then return there(3) end
  for _, copy in ipairs(redis.call('HKEYS', copies)) do
    if redis.call('HEXISTS', body, copy) == 1 then
      id = copy
      return there(3)
    end
    redis.call('HDEL', copies, copy) -- of a message that is gone
  end
end

local now = clock()
local paid
if limits then
  paid = {}
  local wait, which = toll(limits, KEYS[7], key_in(traits), now, paid)
  if wait > 0 then
    if publish ~= '' then redis.call('DEL', sent) end
    return {id, -1, 0, wait, which, said, unsaid}
  end
end
if redis.call('HSETNX', body, id, envelope) == 0 then
  local name = traits and string.match(traits, '[;,]n(%x+)')
  if ARGV[7] == '2' and redis.call('HGET', body, id) == envelope
      and (not name or string.match(redis.call('HGET', KEYS[6], id) or '', '[;,]n(%x+)') == name) then
    return there(0)
  end
  local base = id
  id = id .. '#' .. ARGV[5]
  if redis.call('HSETNX', body, id, envelope) == 0 then
    id = base
    return there(0)
  end
  -- Of the copies of an id it is known when each was put, and where the message under the id itself
  -- waited then: so put_unique.lua knows which of them is the newest.
  redis.call('HSET', copies, id, string.format('%.0f:%s', now, redis.call('ZSCORE', store, base) or ''))
  if ttl > 0 then keep(copies) end
end
local us, score = due_at(now, ARGV[3]), due_score(now)
if us > now then score = action_score(us) end
local first_score = score
score = free_score(store, score, step > 0 or traits and key_in(traits) ~= '')

if limits then pay(limits, KEYS[7], now, paid) end
if traits == '' then
  if ttl > 0 then redis.call('HDEL', KEYS[6], id) end
elseif traits then
  redis.call('HSET', KEYS[6], id, traits)
end
if step > 0 and us == now and score - first_score < 5000 then -- no more than 5 ms later
  enter_lane(store, KEYS[8], KEYS[9], KEYS[10], step, score, key_in(traits), id)
else
  redis.call('ZADD', store, score, id)
end
for n = 8, 7 + ordered do
  local holder = redis.call('HGET', KEYS[n], key_in(traits))
  if holder and (holder == ARGV[1] or string.sub(holder, 1, #ARGV[1] + 1) == ARGV[1] .. '#') then
    if n > 8 then redis.call('HDEL', KEYS[n], key_in(traits)) end
    redis.call('HSET', KEYS[8], key_in(traits), id)
  end
end
announce_if_first(wake, armed, ARGV[4], math.max(us, action_time(score)), now)
if ttl > 0 then
  for i = 1, 3 do keep(KEYS[i]) end
  if wake then keep(wake) end
end
if log then
  -- It may have the id of the one that it takes the place of, whose row ends.
  if ARGV.takes then log_change(log, most, 'c', id) end
  log_change(log, most, 'p', id)
end
return {id, 1, now, said, unsaid}
