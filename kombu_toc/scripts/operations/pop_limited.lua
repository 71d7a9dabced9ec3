-- Delivers messages of a topic that is limited: what may start now, key by key (lanes.lua).
--
-- KEYS, per slot: armed, prepare, body, dead, reasons, tokens, store (one per priority step), lanes,
--      turns, waits, pace, tags, busy, holders
-- then armed, pace and busy of the slot where the whole queue's limits are kept
-- then what was given to the consumer last
-- then the wake index, if it is on this node
-- ARGV[1...19] as those of pop.lua, but that ARGV[5], messages that have been due for a while,
--         counts only if ARGV[3] is 0: nothing is fetched ahead of its start
-- ARGV[20] the limits, see lanes.lua
-- ARGV[21] number of the slot where the whole queue's limits are kept   ARGV[22...] the slot numbers
-- Returns what pop.lua does, but before the announcements: the token of each message, in their order;
--          {number of a message, from 0, when it may start, in microseconds since the epoch, ...} of
--          those that may not at once. An id is always in its place
--
-- Something due is left only if it may start now, or if there is more to look through. What waits for
-- a rate is announced for the time when that opens; what waits for a place is not announced: whoever
-- frees one does.
--
-- What may start at once goes to no lane, unless keys take turns.
--@ clock admitted wake failure token recover lease sorted deliver lanes

local slots, steps = tonumber(ARGV[1]), tonumber(ARGV[2])
local soon, late = tonumber(ARGV[3]), tonumber(ARGV[5])
local recover, width = tonumber(ARGV[9]), 6 + steps + LANE_KEYS
local given, wake = KEYS[slots * width + 4], KEYS[slots * width + 5]
local now = clock()
local now_ms, most = math.floor(now / 1000), soon > 0 and soon or late
local passed = soon > 0 and now + tonumber(ARGV[4]) or now - tonumber(ARGV[6])
local horizon, by = due_score(passed), math.max(now, passed)
local rolled, died, bare, dropped, expired = {}, {}, {}, {}, {}
local untried = tonumber(ARGV[8])
local terms, gates = read_terms(ARGV[7], ARGV[19]), read_gates(ARGV[20])
terms.place, terms.limited = gates.places, true

-- Messages that one slot sorts, beside as many as it may deliver; entries of lanes that one call
-- looks at, beside those of what it delivers; entries that it sweeps out of a set.
local SORTED, LOOKS, SWEPT = 100, 100, 20

local function redis_key(number, part) return KEYS[(number - 1) * width + part] end

-- A list that is not copied again and again while it grows.
local function roomy()
  if most < 9 then return {} end
  return {
    nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
    nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
    nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
    nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
  }
end

-- What is kept of a slot: what is known of keys; what was read last of its stores: step, where, how
-- many at most, ids and scores, how long that is, where the next is, and from AT on tokens, and what is
-- known of their keys, and where the next is; the key whose turn it is, its order, and whether it goes
-- before what is not sorted; ids to be delivered, and how many; their bodies, leases and tokens; of
-- their keys how many run, up to when the rate is used up, and what holds them; keys to be placed
-- anew; what goes to lanes, and out of them; whether something is not delivered after all; where
-- turns have ended.
local KNOWN, STEP, FROM, CHUNK, READ, SIZE, AT, TOKENS, OF, NTH = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
local TURN, ORDER, IN_LANE, CHOSEN, SEEN, BODIES, LEASES, BIRTHS = 11, 12, 13, 14, 15, 16, 17, 18
local RUN, PACED, HELD, TOUCHED, SORTS, GONE, UNDONE, TAGS = 19, 20, 21, 22, 23, 24, 25, 26

-- The slots, as far as they matter: most have what is due and later than what is delivered.
local all = {}
local function slot_at(number)
  local slot = all[number]
  if slot then return slot end
  local before = (number - 1) * width
  local behind, stores = before + 6 + steps, {}
  for step = 1, steps do stores[step] = KEYS[before + 6 + step] end
  -- Its keys as lanes_at has them; and what is numbered above, all at once: a table that grows is
  -- copied.
  slot = {
    {}, 1, 0, 0, false, 0, 1, false, false, 1, false, false, false, false, 0, false, false, false,
    false, false, false, false, false, false, false, false,
    index = number - 1, number = ARGV[21 + number], stores = stores, laned = false,
    armed = KEYS[before + 1], prepare = KEYS[before + 2], body = KEYS[before + 3],
    dead = KEYS[before + 4], reasons = KEYS[before + 5], tokens = KEYS[before + 6],
    lanes = KEYS[behind + 1], turns = KEYS[behind + 2],
    waits = KEYS[behind + 3], pace = KEYS[behind + 4], tags = KEYS[behind + 5],
    busy = KEYS[behind + 6], holders = KEYS[behind + 7],
  }
  all[number] = slot
  return slot
end
local function each_slot() -- makes all
  for number = 1, slots do slot_at(number) end
  return all
end
local gate = gate_at(slots * width, ARGV[21])
local begun = {} -- keys of which something starts, while a key may be in several slots
if gates.draining and slots > 1 then gates.siblings = each_slot() end
write_nothing(redis_key(1, 2)) -- what is refused when the server is full is not refused behind this

local name, remember = ARGV[16], ARGV[17] ~= '0'
local known = remember and redis.call('GET', given)
if known and string.sub(known, 1, #name + 1) == name .. '\n' then
  -- It has run already, or its consumer waits for it no more.
  return {now, 1, {}, bare, rolled, died, dropped, expired, said, unsaid}
end

local function add(list, number, ids)
  for i = 1, #ids do
    list[#list + 1], list[#list + 2] = number - 1, ids[i]
  end
end

if recover > 0 then
  local until_score = math.min(now_ms, math.floor(tonumber(ARGV[15]) / 1000)) * 1000 + 999
  local ended, deads = string.format('%.0f', until_score), {}
  for number = 1, slots do
    deads[number] = redis_key(number, 4)
    if redis.call('ZRANGEBYSCORE', redis_key(number, 2), '-inf', ended, 'LIMIT', 0, 1)[1] then
      local slot, over = slot_at(number), {}
      local function leave(id, token, ended) free_place(slot, id, token, ended, gates, by, gate) end
      roll_back(slot, recover, until_score, now_ms, tonumber(ARGV[10]), tonumber(ARGV[11]), untried,
        rolled, died, over, leave)
      add(bare, number, over)
    end
  end
  for number = 1, redis.call('EXISTS', unpack(deads)) > 0 and slots or 0 do
    add(dropped, number,
      drop_dead(slot_at(number), recover, now_ms, tonumber(ARGV[12]), tonumber(ARGV[13])))
  end
end
for number = 1, terms.ttl and slots or 0 do
  local slot, gone = slot_at(number), {}
  terms.left = function(id, token, step, score)
    leave_lane(slot, id, step, score, token)
    let_go(slot, id, key_of(token), gates, by)
  end
  expire_waiting(slot, SORTED, now_ms - terms.ttl, now_ms, terms, untried, gone)
  add(expired, number, gone)
end

-- Keys whose rate has opened may go on; where keys take turns, all that is due is sorted first.
local unsorted = false
local used = 1 -- which steps hold anything: the first nearly always, the others rarely
do
  local rare, n = {}, 0 -- turns, waits, and the stores of further steps
  for number = 1, slots do
    local before = (number - 1) * width + 6
    rare[2 * number - 1], rare[2 * number] = KEYS[before + steps + 2], KEYS[before + steps + 3]
    for step = 2, steps do
      n = n + 1
      rare[2 * slots + n] = KEYS[before + step]
    end
  end
  local lanes = redis.call('EXISTS', unpack(rare)) > 0
  if lanes and n > 0 then
    if redis.call('EXISTS', unpack(rare, 2 * slots + 1)) > 0 then used = steps end
    lanes = redis.call('EXISTS', unpack(rare, 1, 2 * slots)) > 0
  end
  gates.used = used
  if gates.fair or lanes then
    for _, slot in ipairs(each_slot()) do
      if gates.fair then
        if sort_due(slot, horizon, math.min(SORTED + math.ceil(most / slots), 1000), gates, by) then
          unsorted = true
          -- A key that has just come beside a backlog does not wait until all of that is sorted.
          if not gates.serial then sort_due(slot, horizon, SORTED, gates, by, true) end
        end
        -- More than can start, so that none waits for this step for long.
        local others = redis.call('ZRANGEBYSCORE', slot.turns, NO_TURN, '+inf',
          'LIMIT', 0, math.min(most, SORTED) + 10)
        for i = 1, #others do place_key(slot, others[i], gates, by) end
      end
      local open = redis.call('ZRANGEBYSCORE', slot.waits, '-inf', string.format('%.0f', by),
        'LIMIT', 0, SORTED + most)
      for i = 1, #open do place_key(slot, open[i], gates, by) end
      if gates.siblings then -- what one of them waits for may have been freed in another
        local held = some_of(slot.waits, '+inf', '+inf', SORTED, now)
        for i = 1, #held do place_key(slot, held[i], gates, by) end
      end
      slot.laned = redis.call('EXISTS', slot.turns, slot.waits) > 0
    end
  end
end
if gates.key_rate or gates.fair then
  local number, part = now % slots + 1, 6 + steps
  sweep_lanes({pace = redis_key(number, part + 4), tags = redis_key(number, part + 5)}, SWEPT, now)
end

local unread = gates.fair and unsorted -- then what is not sorted is not looked at
local running, opens = 0, whole_opens_at(gate, gates, by)
if gates.most then running = tonumber(redis.call('HGET', gate.busy, '') or 0) end
local whole_most, key_most = gates.most or math.huge, gates.key_most or math.huge
local key_rate, key_slack = gates.key_rate, gates.key_slack
local function queue_opens() -- when the whole queue may start something; nil: when a place is free
  if running >= whole_most then return nil end
  return opens
end

-- What is known of a key: how many run, when the rate opens, what holds it, whether it has a lane but
-- may start nothing of that, whether it may; the next entry of its lane, if that is known; and the key.
local RAN, OPENS, HOLDER, WAITS, IN_TURNS, HEAD, KEY = 1, 2, 3, 4, 5, 6, 7

-- By slot: the order of what comes next of what is not sorted, or false; when something is due later.
local nexts, future = {}, {}

-- What is to be delivered: slot, step, id, score, ...; and token, what is known of its key, when its
-- limits let it start, ...
local order, more, taken, left = roomy(), roomy(), 0, 0

local function touch(slot, key)
  slot[TOUCHED] = slot[TOUCHED] or {}
  slot[TOUCHED][key] = true
end

local virtual = 0 -- where the present turn began, where keys take turns
if gates.fair then
  for _, slot in ipairs(all) do
    virtual = math.max(virtual, tonumber(redis.call('ZSCORE', slot.tags, '!') or 0))
  end
end

-- Chooses what is to be delivered, in the order of what comes next of each slot: of what is not sorted, and
-- of the keys that have a lane.
do
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
end

-- Out of where they were, and their bodies read, in as few commands as there are slots and steps.
if used > 1 then
  local out = {}
  for i = 1, 4 * taken, 4 do
    local store = all[order[i]].stores[order[i + 1]]
    local ids = out[store]
    if not ids then
      ids = {}
      out[store] = ids
    end
    ids[#ids + 1] = order[i + 2]
  end
  for store, ids in pairs(out) do in_parts('ZREM', store, ids) end
end
for number = 1, slots do
  local slot = all[number]
  local ids = slot and slot[CHOSEN]
  if ids then
    if used == 1 then in_parts('ZREM', slot.stores[1], ids) end
    if #ids <= 1000 then
      slot[BODIES] = redis.call('HMGET', slot.body, unpack(ids))
    else
      slot[BODIES] = {}
      for from = 1, #ids, 1000 do
        local some = redis.call('HMGET', slot.body, unpack(ids, from, math.min(from + 999, #ids)))
        for i = 1, #some do slot[BODIES][from + i - 1] = some[i] end
      end
    end
    slot[SEEN], slot[LEASES], slot[BIRTHS] = 0, {}, {}
  end
  if slot and slot[GONE] then in_parts('ZREM', slot.lanes, slot[GONE]) end
  if slot and slot[TAGS] then
    in_parts('ZADD', slot.tags, slot[TAGS])
    redis.call('ZADD', slot.tags, virtual, '!')
  end
  if slot and slot[SORTS] then
    for step, sorted in pairs(slot[SORTS]) do
      in_parts('ZADD', slot.stores[step], sorted.scores)
      in_parts('ZADD', slot.lanes, sorted.entries)
    end
  end
end

local messages, births, whens, starts = roomy(), {}, {}, 0
do
  local again, later, at = {}, {}, 0
  local lease = now_ms + terms.visibility
  local simple = not terms.ttl and not terms.longest and not terms.own
  local place, key_place = gates.places and ',p1' or '', gates.places and ';p1' or ''
  local holds = gates.serial and not gates.later
  -- What is not delivered after all has used nothing of the rate.
  opens = whole_opens_at(gate, gates, by)
  for i = 1, taken do
    local n = 4 * i
    local slot, step, id, score = all[order[n - 3]], order[n - 2], order[n - 1], order[n]
    local token, of_key, start = more[3 * i - 2], more[3 * i - 1], more[3 * i]
    local key, seen = of_key[KEY], slot[SEEN] + 1
    slot[SEEN] = seen
    local envelope, low = slot[BODIES][seen], score % 1000
    low = 32 * (step - 1) + (low < 32 and low or untried)
    local birth, ends
    if not envelope then
      redis.call('HDEL', slot.reasons, id)
      redis.call('HDEL', slot.tokens, id)
      bare[#bare + 1], bare[#bare + 2] = slot.index, id
    elseif simple and (not token or #token == #key + 2 and key ~= '') then
      -- As deliver.lua has it: most have no trait but their key.
      birth, ends = name .. (token and token .. place or key_place), lease
    else
      birth, ends = deliver(token, score, name, now_ms, terms)
      if not birth then
        expire(slot, id, now_ms * 1000 + low, terms.drop)
        expired[#expired + 1], expired[#expired + 2] = slot.index, id
      end
    end
    if birth then
      starts = starts + 1
      if gates.rate then opens = math.max(opens + gates.slack, start) + gates.rate - gates.slack end
      local part = slot[LEASES]
      local m = #part
      part[m + 1], part[m + 2] = ends * 1000 + low, id
      part = slot[BIRTHS]
      part[m + 1], part[m + 2] = id, birth
      messages[at + 1], messages[at + 2], messages[at + 3] = slot.index, step - 1, id
      messages[at + 4], messages[at + 5] = score, envelope
      at, births[starts] = at + 5, birth
      -- That it is due later says enough.
      if start > now and start > action_time(score) then
        local when = math.ceil(start)
        whens[#whens + 1], whens[#whens + 2] = starts - 1, when
        if remember then later[tostring(n - 3)] = string.format('%.0f', when) end
      end
      if remember then
        again[#again + 1], again[#again + 2] = n - 3, birth
      end
      if key ~= '' then
        part = slot[RUN]
        if not part then
          part = {}
          slot[RUN], slot[PACED], slot[HELD] = part, key_rate and {}, holds and {}
        end
        m = #part
        part[m + 1], part[m + 2] = key, of_key[RAN]
        if key_rate then
          part = slot[PACED]
          part[m + 1], part[m + 2] = of_key[OPENS] + key_slack, key
        end
        if holds then
          part = slot[HELD]
          part[m + 1], part[m + 2] = key, id
        end
      end
    elseif key ~= '' then
      touch(slot, key)
      of_key[RAN] = of_key[RAN] - 1
      slot[UNDONE], more[3 * i - 1] = true, false
    else
      more[3 * i - 1] = false
    end
  end
  -- Nor has it of its key's.
  for number = 1, key_rate and slots or 0 do
    local slot = all[number]
    if slot and slot[UNDONE] and slot[PACED] then
      local paced = {} -- of each key, where in PACED its rate has been used up to
      slot[PACED] = {}
      for i = 1, taken do
        local of_key = order[4 * i - 3] == number and more[3 * i - 1]
        local key = of_key and of_key[KEY] or ''
        if key ~= '' then
          local at = paced[key]
          if not at then
            at = #slot[PACED] + 1
            local opens = key_opens_at(slot, key, gates, by)
            paced[key], slot[PACED][at], slot[PACED][at + 1] = at, opens + key_slack, key
          end
          slot[PACED][at] = math.max(slot[PACED][at], more[3 * i]) + key_rate
          of_key[OPENS] = slot[PACED][at] - key_slack
        end
      end
    end
  end
  for number = 1, slots do
    local slot = all[number]
    if slot and slot[LEASES] and slot[LEASES][1] then
      in_parts('ZADD', slot.prepare, slot[LEASES])
      if terms.far then note_longest(slot.tokens, terms.visibility) end
      in_parts('HSET', slot.tokens, slot[BIRTHS])
      local ran = slot[RUN]
      if ran then
        if gates.siblings then
          for i = 1, gates.places and #ran or 0, 2 do redis.call('HINCRBY', slot.busy, ran[i], 1) end
        elseif gates.places then
          for i = 1, slot[UNDONE] and #ran or 0, 2 do ran[i + 1] = slot[KNOWN][ran[i]][RAN] end
          in_parts('HSET', slot.busy, ran)
        end
        if key_rate then in_parts('ZADD', slot.pace, slot[PACED]) end
        if holds then in_parts('HSET', slot.holders, slot[HELD]) end
      end
    end
    if slot and slot[TOUCHED] then
      for key in pairs(slot[TOUCHED]) do place_key(slot, key, gates, by) end
    end
  end
  if starts > 0 and gates.places then redis.call('HINCRBY', gate.busy, '', starts) end
  if starts > 0 and gates.rate then redis.call('ZADD', gate.pace, opens + gates.slack, '') end
  if remember and starts > 0 then
    local gives = name .. '\n' .. cmsgpack.pack({order, again, later}) -- for recall.lua
    redis.call('SET', given, gives, 'EX', ARGV[17])
  end
end
running = running - taken + starts

local allowed = queue_opens()
if allowed and allowed <= by and left == 0 then
  for number = 1, slots do
    local slot = all[number]
    if slot and (slot.laned or slot[TOUCHED]) then
      if follow_gates(slot, SORTED, gates, by) then unsorted = true end
      if not unsorted and redis.call('EXISTS', slot.turns) == 1 then unsorted = true end
    end
  end
  if unsorted then left = 1 end
end
if not allowed or allowed > by then
  -- The whole queue waits. Some of what is due is sorted, so that it is known which keys do.
  for number = 1, slots do
    if nexts[number] then
      sort_due(slot_at(number), horizon, 20, gates, by)
      touch(slot_at(number), '')
    end
  end
end
-- Slots with an announcement up to then that nobody has claimed, which serves for what is left.
local open = {}
if wake and not gates.most and not gates.rate then
  local unclaimed = redis.call('ZRANGEBYSCORE', wake, '-inf', string.format('%.0f', by),
    'LIMIT', 0, 4 * slots)
  for i = 1, #unclaimed do open[string.match(unclaimed[i], '^%d+')] = true end
end
local rest = {}
for number = 1, slots do
  local slot, first = all[number], nil
  -- Of a slot without lanes it is known when something may start next, if it was looked at.
  if not unread and (not slot or not slot.laned and not slot[TOUCHED]) then
    first = nexts[number] and now or future[number] or false
  end
  if not first or first > by or not open[ARGV[21 + number]] then
    slot = slot_at(number)
    slot.first = first
    rest[#rest + 1] = slot
  end
end
announce_openings(rest, gates, gate, wake, ARGV[14] == '0', by, now, allowed)
return {now, left, messages, bare, rolled, died, dropped, expired, births, whens, said, unsaid}
