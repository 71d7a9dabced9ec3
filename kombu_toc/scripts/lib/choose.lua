-- Fragment: a part of pop_limited.lua: chooses what is to be delivered, in the order of what comes next
-- of each slot: of what is not sorted, and of the keys that have a lane.

-- Learns what is to be known of keys; of one whose turn it is, it is known that it has a lane.
local function learn(slot, keys, is_turn)
  local known, none = slot[KNOWN], {}
  local ran = gates.places and redis.call('HMGET', slot.busy, unpack(keys)) or none
  local paces = key_rate and redis.call('ZMSCORE', slot.pace, unpack(keys)) or none
  local holders = gates.serial and redis.call('HMGET', slot.holders, unpack(keys)) or none
  local laned = slot.laned and not is_turn
  local turns = laned and redis.call('ZMSCORE', slot.turns, unpack(keys)) or none
  local waits = laned and redis.call('ZMSCORE', slot.waits, unpack(keys)) or none
  for i = 1, #keys do
    local key, of_key = keys[i], known[keys[i]]
    if turns[i] then of_key[IN_TURNS] = true end
    if waits[i] then of_key[WAITS] = true end
    if key ~= '' then
      if gates.siblings then
        of_key[RAN], of_key[OPENS] = running_of(slot, key, gates), key_opens_at(slot, key, gates, by)
      else
        if ran[i] then of_key[RAN] = tonumber(ran[i]) end
        if paces[i] then
          local open = tonumber(paces[i]) - key_slack
          of_key[OPENS] = open > by + key_rate and opens_at(slot, key, gates, by) or open
        end
      end
      of_key[HOLDER] = holders[i] or false
    end
  end
end

local heads = {} -- by slot: the order of what comes next
local function is_due(number, score)
  if score <= horizon then return true end
  local us = action_time(score)
  if not future[number] or us < future[number] then future[number] = us end
end

-- Reads on in what is not sorted: the next that is due, or when the next is due.
local function read(slot, chunk)
  slot[READ], slot[TOKENS], slot[CHUNK] = false, false, chunk
  while slot[STEP] <= used do
    local some = redis.call('ZRANGEBYSCORE', slot.stores[slot[STEP]], 0, '+inf', 'WITHSCORES',
      'LIMIT', slot[FROM], chunk)
    local first = tonumber(some[2] or '')
    if first and is_due(slot.index + 1, first) then
      slot[READ], slot[SIZE], slot[AT], slot[FROM] = some, #some, 1, slot[FROM] + #some / 2
      nexts[slot.index + 1] = (slot[STEP] - 1) * 4e15 + first
      return
    end
    slot[STEP], slot[FROM] = slot[STEP] + 1, 0
  end
  nexts[slot.index + 1] = false
end

-- The tokens and keys of what was read.
local function look_up(slot)
  local ids, names, n = slot[READ], {}, 0
  for i = slot[AT], slot[SIZE], 2 do
    local score = tonumber(ids[i + 1])
    ids[i + 1] = score
    if score > horizon then break end
    n = n + 1
    names[n] = ids[i]
  end
  local tokens, keyed, new = redis.call('HMGET', slot.tokens, unpack(names)), {}, {}
  local known, at, count = slot[KNOWN], slot[AT] - 1, 0
  for i = 1, n do
    local token, key = tokens[i], ''
    if token and is_still(token, ids[at + 2 * i]) then
      key = key_of(token)
    else
      tokens[i] = false
    end
    local of_key = known[key]
    if not of_key then
      of_key = {0, 0, false, false, false, false, key}
      known[key] = of_key
      count = count + 1
      new[count] = key
    end
    keyed[i] = of_key
  end
  if count > 0 then learn(slot, new) end
  slot[TOKENS], slot[OF], slot[NTH] = tokens, keyed, 1
end

-- The key that comes next of a slot.
local function look_at_turns(slot)
  if not slot.laned then return end
  local head = redis.call('ZRANGE', slot.turns, 0, 0, 'WITHSCORES')
  slot[TURN], slot[ORDER] = head[1] or false, tonumber(head[2] or '') or false
end

local function line_up(slot)
  local turn, next = slot[TURN] and slot[ORDER], nexts[slot.index + 1]
  slot[IN_LANE] = turn and (not next or turn <= next)
  heads[slot.index + 1] = slot[IN_LANE] and turn or next
end

local chunk = math.min(math.floor(most / slots) + 2, 500)
for number = 1, slots do
  local slot = all[number]
  nexts[number], future[number], heads[number] = false, false, false
  if used > 1 or slot and slot.laned then
    slot = slot_at(number)
    look_at_turns(slot)
    if not unread then read(slot, chunk) end
    line_up(slot)
  elseif not unread then
    local first = tonumber(redis.call('ZRANGE', redis_key(number, 7), 0, 0, 'WITHSCORES')[2] or '')
    if first and first < 0 then
      first = tonumber(redis.call('ZRANGEBYSCORE', redis_key(number, 7), 0, '+inf', 'WITHSCORES',
        'LIMIT', 0, 1)[2] or '')
    end
    if first and is_due(number, first) then nexts[number], heads[number] = first, first end
  end
end

local looks, budget = LOOKS + most, tonumber(ARGV[18])
local due_now = due_score(now)

-- Chooses a message to be started at `at`; whether there is room for it.
local function choose(slot, step, id, score, token, of_key, at)
  if most > 1 then
    budget = budget - redis.call('HSTRLEN', slot.body, id)
    if budget < 0 and taken > 0 then return false end
  end
  taken, running = taken + 1, running + 1
  if score > due_now then at = math.max(at, action_time(score)) end
  of_key[RAN] = of_key[RAN] + 1
  local key = of_key[KEY]
  if key ~= '' then
    if key_rate then of_key[OPENS] = math.max(of_key[OPENS] + key_slack, at) + key_rate - key_slack end
    if gates.serial then of_key[HOLDER] = id end
    if gates.siblings then begun[key] = true end
  end
  if gates.rate then opens = math.max(opens + gates.slack, at) + gates.rate - gates.slack end
  local n = 4 * taken
  order[n - 3], order[n - 2], order[n - 1], order[n] = slot.index + 1, step, id, score
  n = n - taken
  more[n - 2], more[n - 1], more[n] = token, of_key, at
  local seen = slot[SEEN] + 1
  slot[SEEN] = seen
  if seen == 1 then slot[CHOSEN] = {} end
  slot[CHOSEN][seen] = id
  return true
end

-- When a message of a key may start, or nil if it may not within the horizon.
local function startable(slot, of_key, id, allowed)
  local key = of_key[KEY]
  if key == '' then return allowed end
  if of_key[RAN] >= key_most or of_key[OPENS] > by then return nil end
  if gates.siblings then
    if begun[key] then return nil end
    if gates.serial and not of_key[HOLDER] and held_by(slot, key, gates) == false then return nil end
  end
  if of_key[HOLDER] and of_key[HOLDER] ~= id then
    if held_by(slot, key, gates) ~= nil then return nil end
    of_key[HOLDER] = false
  end
  local opens = of_key[OPENS]
  return opens > allowed and opens or allowed
end

-- Entries of one lane that are looked at together if they say nothing any more.
local STALE = 100

-- The entry behind one that says nothing any more; those between them that say nothing either go. Ten
-- of them count as one look.
local function behind_stale(slot, key, entry)
  local some = redis.call('ZRANGE', slot.lanes, '(' .. entry, '(' .. key .. '\1', 'BYLEX',
    'LIMIT', 0, STALE)
  if #some < 2 then return some[1] end
  local gone, ids, scores, first = slot[GONE], {}, {}, nil
  for i = 1, #some - 1 do
    local step, score, id = read_entry(some[i])
    first = first or step
    if step ~= first then break end
    ids[i], scores[i] = id, sorted_score(score)
  end
  local known, i = redis.call('ZMSCORE', slot.stores[first], unpack(ids)), 1
  while i <= #ids and tonumber(known[i] or '') ~= scores[i] do
    gone[#gone + 1] = some[i]
    i = i + 1
  end
  looks = looks - (i - 1) / 10
  return some[i]
end

-- Something of a lane: the entry is taken out of it if it may start or says nothing any more.
local function try_turn(slot, allowed)
  local key = slot[TURN]
  local of_key, held = slot[KNOWN][key], nil
  if not of_key then
    of_key = {0, 0, false, false, true, false, key}
    slot[KNOWN][key] = of_key
    learn(slot, {key}, true)
  end
  if gates.serial and key ~= '' and (of_key[HOLDER] or gates.siblings) then
    held = held_by(slot, key, gates)
  end
  local entry = held
  if held == nil then entry = of_key[HEAD] or head_of(slot, key) end
  local step, score, id
  if entry then step, score, id = read_entry(entry) end
  local at = entry and score <= horizon and startable(slot, of_key, id, allowed)
  local tag, rest = slot[ORDER], nil
  if at then
    local stands = tonumber(redis.call('ZSCORE', slot.stores[step], id) or '') == sorted_score(score)
    local token = stands and redis.call('HGET', slot.tokens, id)
    if token and not is_still(token, score) then token = false end
    local stale = not stands or key_of(token) ~= key
    if not stale then
      if not choose(slot, step, id, score, token, of_key, at) then return false end
      looks = looks + 1
      if gates.fair then
        virtual = math.max(virtual, slot[ORDER])
        tag = virtual + 1 / weight_of(gates, key)
        slot[TAGS] = slot[TAGS] or {}
        local n = #slot[TAGS]
        slot[TAGS][n + 1], slot[TAGS][n + 2] = tag, key
      end
    end
    local more = startable(slot, of_key, nil, allowed)
    if held then
      redis.call('ZREM', slot.lanes, entry)
      of_key[HEAD], rest = false, more and head_of(slot, key)
    else
      slot[GONE] = slot[GONE] or {}
      slot[GONE][#slot[GONE] + 1] = entry
      if more and stale then
        rest = behind_stale(slot, key, entry)
      elseif more then
        rest = redis.call('ZRANGE', slot.lanes, '(' .. entry, '(' .. key .. '\1', 'BYLEX',
          'LIMIT', 0, 1)[1]
      end
    end
  end
  if rest then step, score = read_entry(rest) end
  if rest and score <= horizon then
    of_key[HEAD] = rest
    redis.call('ZADD', slot.turns, gates.fair and tag or (step - 1) * 4e15 + score, key)
  else
    redis.call('ZREM', slot.turns, key)
    touch(slot, key)
  end
  look_at_turns(slot)
  return true
end

-- The slot with what comes next, and the order of what comes next of the others.
local number, second

-- Something that is not sorted: it goes to a lane if it may not start.
local function try_next(slot, allowed)
  if slot[CHUNK] == 0 then
    local some = chunk
    if taken == 0 and second then -- as many as come before what any other slot has
      local to = string.format('(%.0f', second)
      some = math.min(math.max(chunk, redis.call('ZCOUNT', slot.stores[1], 0, to) + 1), most + 1, 500)
    end
    read(slot, some)
  end
  if not slot[TOKENS] then look_up(slot) end
  local nth, step, id, score = slot[NTH], slot[STEP], slot[READ][slot[AT]], slot[READ][slot[AT] + 1]
  local of_key = slot[OF][nth]
  -- What has a lane whose turn may come is due later than this; what waits there is not.
  local at = (not of_key[WAITS] or of_key[HOLDER] == id) and startable(slot, of_key, id, allowed)
  if at then
    if not choose(slot, step, id, score, slot[TOKENS][nth], of_key, at) then return false end
    looks = looks + 1
    if of_key[WAITS] or of_key[IN_TURNS] then touch(slot, of_key[KEY]) end
  else
    local key = of_key[KEY]
    of_key[WAITS] = true
    slot[SORTS] = slot[SORTS] or {}
    local sorted = slot[SORTS][step] or {scores = {}, entries = {}}
    slot[SORTS][step] = sorted
    local n = #sorted.scores
    sorted.scores[n + 1], sorted.scores[n + 2] = sorted_score(score), id
    sorted.entries[n + 1], sorted.entries[n + 2] = 0, entry_of(key, step, score, id)
    touch(slot, key)
  end
  local i = slot[AT] + 2
  if i > slot[SIZE] then
    local chunk = slot[CHUNK]
    if slot[SIZE] < 2 * chunk then slot[STEP], slot[FROM] = step + 1, 0 end
    -- As many of the rest as of what was found so far; more if little of it may start.
    local share = math.floor((most - taken) * slot[SEEN] / math.max(taken, 1)) + 2
    read(slot, math.min(slot[SEEN] < chunk and math.max(share, 4 * chunk) or share, 500))
    return true
  end
  score = tonumber(slot[READ][i + 1])
  if is_due(slot.index + 1, score) then
    slot[AT], slot[NTH], nexts[slot.index + 1] = i, nth + 1, (step - 1) * 4e15 + score
  else
    slot[STEP], slot[FROM] = step + 1, 0
    read(slot, slot[CHUNK])
  end
  return true
end

while true do
  local head = number and heads[number]
  if not head or second and head >= second then
    head, second = false, false
    for one = 1, slots do
      local order = heads[one]
      if order and (not head or order < head) then
        number, head, second = one, order, head
      elseif order and (not second or order < second) then
        second = order
      end
    end
  end
  if not head or running >= whole_most or opens > by then break end
  if taken >= most or looks <= 0 then
    left = 1
    break
  end
  looks = looks - 1
  local slot, allowed = slot_at(number), opens > now and opens or now
  local room
  if slot[IN_LANE] then room = try_turn(slot, allowed) else room = try_next(slot, allowed) end
  if not room then
    left = 1
    break
  end
  line_up(slot)
end
