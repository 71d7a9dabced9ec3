-- Adds a message as put_special.lua does, unless another one has its unique key; or puts it in the place of
-- the newest one of its id that waits.
--
-- KEYS[1] claims   KEYS[2] dead   KEYS[3] reasons   KEYS[4] tokens
-- KEYS[5...] store (one per priority step)
-- then those of put_special.lua
-- ARGV[1] number of priority steps   ARGV[2] the unique key, encoded; or '', and it takes the place of
--         the newest message of its id that waits, if any does: ARGV[3] to ARGV[9] do not matter then
-- ARGV[3] how long its claim holds: 0 until it starts, 1 until it is done, 2 for a time
-- ARGV[4] that time, in microseconds, or 0   ARGV[5] CRC-32 of the slot basis
-- ARGV[6] what is done if another message has the key: 'keep' or 'raise', nothing; 'replace', this
--         one takes its place; 'push_back', the same, and it gets no earlier; 'add', this one is added
--         in any case, and has the key if no other message has it and its claim holds until it is
--         done
-- ARGV[7] microseconds after the first message of the claim until which it may be pushed back, or ''
-- ARGV[8] the id that the other one is kept under, if this one was made to take its place; else ''
-- ARGV[9] 1: it goes on for the message of its own id, as a retry does, and so has the key of that
-- then those of put_special.lua; the id is the other one's then
-- Returns what put_special.lua does, and 4 in place of 1 if it has taken the place of another. If nothing was
-- added because of another message: {the id that it is
-- kept under, 2, 1 if it waits, else 0, its own id, announcements, settled}; the ids are empty if one
-- was to be replaced, and no message has the key any more
--
-- A repeated put is recognised first, as by put_special.lua. What that refuses has claimed nothing.
--@ clock admitted wake token sorted claim

local steps = tonumber(ARGV[1])
local claims, dead, reasons, tokens = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local stores = {unpack(KEYS, 5, 4 + steps)}
local name, mode, lasts, crc, conflict = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6]
local at_most, expected, goes_on = tonumber(ARGV[7]), ARGV[8], ARGV[9] == '1'
for i = 1, #KEYS do KEYS[i] = KEYS[i + 4 + steps] end
for i = 1, #ARGV do ARGV[i] = ARGV[i + 9] end
local body, sent, ttl = KEYS[2], KEYS[5], tonumber(ARGV[6])

local function put()
--< put_special
end

if ARGV[8] ~= '' and redis.call('GET', sent) == ARGV[8] then return put() end

-- The message of an id that was put last, of those that wait: the id that it is kept under, the number
-- of its step, and its score. What was tried is older than the copies of its id.
local function newest(base)
  local found, step, score, latest, before
  local known = redis.call('HGETALL', KEYS[4])
  for i = 1, #known, 2 do
    local at, plain = string.match(known[i + 1], '^(%d+):(.*)$')
    local its, of_it = waits_at(stores, known[i])
    if its and (not found or tonumber(at) > latest) then
      found, step, score, latest, before = known[i], its, of_it, tonumber(at), plain
    end
  end
  local its, now_at = waits_at(stores, base)
  if not its then return found, step, score end
  if found then
    local token = redis.call('HGET', tokens, base)
    local is_new = now_at % 1000 >= 32 and (not token or string.byte(token) == 59)
    local is_same = before ~= '' and plain_score(tonumber(before)) == now_at
    if not is_new or is_same or its ~= step then return found, step, score end
  end
  return base, its, now_at
end

local function take_place(store, id)
  redis.call('ZREM', store, id)
  forget(body, reasons, tokens, id)
end

local function put_in_place()
  ARGV.takes = true
  local reply = put()
  if reply[2] == 1 then reply[2] = 4 end
  return reply
end

if name == '' then
  local id, step, score = newest(ARGV[1])
  if not id then return put() end
  take_place(stores[step], id)
  redis.call('HDEL', KEYS[4], id)
  ARGV[10] = '1'
  if ARGV[12] then ARGV[12] = '' end
  return put_in_place()
end

local function keep_claim(claim)
  redis.call('HSET', claims, name, claim_text(claim))
  if ttl > 0 and redis.call('PTTL', claims) < ttl then redis.call('PEXPIRE', claims, ttl) end
end

local function refuse(claim, waits)
  -- Something is written, so that WAIT waits for the other one; a full server refuses no second write.
  write_nothing(stores[1])
  keep_claim(claim)
  return {claim.kept, 2, waits and 1 or 0, claim.base, said, unsaid}
end

local now = clock()
local known = redis.call('HGET', claims, name)
local other, state, step, score
if known then
  other = read_claim(known)
  state, step, score = held(name, other, now, body, dead, tokens, stores)
end
local claim = {mode = mode, first = now, ends = lasts > 0 and now + lasts or 0, crc = crc, base = ARGV[1]}
if state and goes_on and other.base == ARGV[1] then
  claim.first, claim.ends = other.first, mode == other.mode and other.ends or claim.ends
elseif conflict == 'add' and (state or mode ~= '1') then
  -- What has started claims nothing anew, but until it is done; nor does what has its id.
  if known and not state then redis.call('HDEL', claims, name) end
  return put()
elseif state then
  if ARGV[7] == '2' and expected == '' and other.kept == ARGV[1] and redis.call('HGET', body, ARGV[1]) == ARGV[2] then
    return put() -- the same message once more
  end
  local takes = conflict == 'replace' or conflict == 'push_back'
  if not takes or other.kept ~= expected or state ~= 1 then return refuse(other, state == 1) end
  if conflict == 'push_back' then
    local due, at = action_time(score), due_at(now, ARGV[3])
    if due > at then at = due end
    local last = at_most and other.first + at_most
    -- Never earlier than it was; but a score is as exact as a few microseconds, which would add up.
    if last and at > last then at = due > last + 2000 and due or last end
    ARGV[3] = string.format('%.0f', at)
  end
  take_place(stores[step], expected)
  claim.first, claim.ends = other.first, mode == other.mode and other.ends or claim.ends
  claim.base = other.base
  ARGV[1] = expected
elseif expected ~= '' then
  return {'', 2, 0, '', said, unsaid}
end

local reply = (state and expected ~= '') and put_in_place() or put()
if reply.err or reply[3] == 0 then return reply end -- it was there already, or it was refused
claim.kept = reply[1]
keep_claim(claim)

-- Now and then others that hold no longer, as long as such ones are found: so there are not many more
-- of them than of those that hold. A user who may not leaves it to upkeep.
if not state and now % 3 == 0 then
  for _ = 1, 12 do
    local some = redis.pcall('HRANDFIELD', claims, 1, 'WITHVALUES')
    if some.err or some[1] == name
        or held(some[1], read_claim(some[2]), now, body, dead, tokens, stores) then
      break
    end
    redis.call('HDEL', claims, some[1])
  end
end
return reply
