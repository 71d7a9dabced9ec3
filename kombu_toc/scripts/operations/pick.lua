-- Delivers messages by id, and the copies that share the id: store -> prepare, as pop.lua does.
--
-- KEYS[1] armed   KEYS[2] prepare   KEYS[3] body   KEYS[4] dead   KEYS[5] reasons
-- KEYS[6] tokens   KEYS[7...] store (one per priority step)
-- then, per message: the copies set of its id
-- then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number
-- ARGV[3] how many messages at most
-- ARGV[4] bytes that the envelopes may have together; the first may have any
-- ARGV[5] 1: also messages that are not due yet
-- ARGV[6] visibility timeout in milliseconds   ARGV[7] what else holds for them, see deliver.lua
-- ARGV[8] retries of a message that has not been tried
-- ARGV[9] name of this pick, as no pop and no other pick has ever had
-- ARGV[10...] per message: id; then '' and '', or score and SHA-1 of its envelope: then just this
-- message is delivered, if it is still as it was, and no copies
-- Returns {now in microseconds, how many of the messages were looked at,
--          1 if one that could have been delivered was left since there were enough,
--          {slot index, step index, id, store score, envelope, ...}, ids without a body,
--          ids of what has expired, announcements, settled}
-- In place of the id of a message that was delivered before, or has traits: {id, token}.
--
-- What was announced stays so until the slot is empty: whoever wakes for a time that was picked finds
-- the next one, and announces it.
--@ clock admitted wake failure token lease sorted deliver push unlimited

local steps, count = tonumber(ARGV[1]), (#ARGV - 9 - (limited and limited.args or 0)) / 3
local limit, budget, early = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
local terms, untried = read_terms(ARGV[6], ARGV[7]), tonumber(ARGV[8])
local name, wake = ARGV[9], KEYS[7 + steps + count + (limited and limited.keys or 0)]
local now = clock()
local now_ms, horizon = math.floor(now / 1000), due_score(now)
local messages, bare, expired = {}, {}, {}
local stores = {unpack(KEYS, 7, 6 + steps)}
if limited then
  limited.open(KEYS[1], KEYS[2], stores, ARGV[2])
  terms.place = limited.places
end

-- Messages that one call delivers, whatever the caller allows.
local MOST = 1000

local taken, left, looked, seen = {}, 0, 0, {} -- taken: 1, step, id, score, ...
local full = false
for number = 1, count do
  local id, as_it_was = ARGV[7 + 3 * number], ARGV[8 + 3 * number]
  local ids = as_it_was == '' and redis.call('HKEYS', KEYS[6 + steps + number]) or {}
  table.insert(ids, 1, id)
  for i = 1, #ids do
    local step, score = waits_at(stores, ids[i])
    if step and not early and score > horizon then step = nil end
    if step and as_it_was ~= '' then
      local body = score == tonumber(as_it_was) and redis.call('HGET', KEYS[3], ids[i])
      if not body or redis.sha1hex(body) ~= ARGV[9 + 3 * number] then step = nil end
    end
    if step and limited and not seen[ids[i]] and #taken < 4 * limit
        and not limited.may_start(ids[i], redis.call('HGET', KEYS[6], ids[i]), score, now) then
      step = nil
    end
    if step and not seen[ids[i]] then
      if #taken >= 4 * limit then
        left, full = 1, true
        break
      end
      budget = budget - redis.call('HSTRLEN', KEYS[3], ids[i])
      -- Thousands of copies may share an id, small ones.
      if #taken >= 4 * MOST or budget < 0 and #taken > 0 then
        full = true
        break
      end
      seen[ids[i]] = true
      push(taken, 1, step, ids[i], score)
      if limited then
        -- What is not delivered uses nothing of a limit.
        local token = redis.call('HGET', KEYS[6], ids[i])
        local traits = token and is_still(token, score) and heritage_of(token) or ''
        local expires = expires_at(traits, score, terms.ttl, now_ms)
        if expires and expires < now_ms or redis.call('HEXISTS', KEYS[3], ids[i]) == 0 then
          limited.drop(ids[i], step, score, token, now)
        else
          limited.start(ids[i], step, score, token, now)
        end
      end
    end
  end
  if full then break end
  looked = number
end
if #taken == 0 then return {now, looked, left, messages, bare, expired, said, unsaid} end

-- Out of the stores first: a full server refuses what takes memory, but not after a first write.
for i = 1, #taken, 4 do redis.call('ZREM', KEYS[6 + taken[i + 1]], taken[i + 2]) end
for i = 1, #taken, 4 do
  local step, id, score = taken[i + 1], taken[i + 2], taken[i + 3]
  local envelope = redis.call('HGET', KEYS[3], id)
  if envelope then
    local retries = score % 1000 < 32 and score % 1000 or untried
    local low = 32 * (step - 1) + retries
    local token = redis.call('HGET', KEYS[6], id)
    if token and not is_still(token, score) then token = nil end
    local birth, ends = deliver(token, score, name, now_ms, terms)
    if birth then
      redis.call('ZADD', KEYS[2], ends * 1000 + low, id)
      redis.call('HSET', KEYS[6], id, birth)
      if terms.far then note_longest(KEYS[6], terms.visibility) end
      push(messages, 0, step - 1, birth == name and id or {id, birth}, score, envelope)
    else
      expire(slot_from(1, steps), id, now_ms * 1000 + low, terms.drop)
      expired[#expired + 1] = id
    end
  else
    forget(KEYS[3], KEYS[5], KEYS[6], id)
    bare[#bare + 1] = id
  end
end
if limited then limited.announce(wake, now) end
settle_if_empty(wake, KEYS[1], ARGV[2], stores)
return {now, looked, left, messages, bare, expired, said, unsaid}
