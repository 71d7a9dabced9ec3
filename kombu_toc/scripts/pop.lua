-- Delivers messages: store -> prepare, in the same step in which they are read.
--
-- KEYS, per slot: armed, prepare, body, dead, reasons, tokens
-- then, per priority step: the store of each slot
-- then what was given to the consumer last
-- then the wake index, if it is on this node
-- ARGV[1] number of slots   ARGV[2] number of priority steps
-- ARGV[3] how many may be taken that are due within ARGV[4] microseconds from now
-- ARGV[5] how many may be taken that have been due for ARGV[6] microseconds
--         (the two counts include each other: 2 and 8 mean 8 at most)
-- ARGV[7] visibility timeout in milliseconds; a message's own goes before it, unless ARGV[19] says
-- ARGV[8] retries of a message that has not been tried
-- ARGV[9] how many expired leases a slot may roll back first, and how many messages its
--         DeadQueue may drop; 0: none
-- ARGV[10] milliseconds that a message waits after its first failure, doubled with each further
--          one                    ARGV[11] the longest of these waits
-- ARGV[12] milliseconds that DeadQueue keeps a message   ARGV[13] how many a slot's keeps
-- ARGV[14] 1 or more: what is due and left is announced again, whoever may know of it; it matters
--          where the wake index is elsewhere, for the others do not tell who has claimed what. A pop
--          that may take nothing tells so many of what it leaves, in the order of a pop
-- ARGV[15] microseconds since the epoch until which leases that have ended may be rolled back
-- ARGV[16] name of this pop, as no other has ever had
-- ARGV[17] seconds for which what it gives is remembered, or 0: see recall.lua
-- ARGV[18] bytes that the envelopes may have together; the first may have any
-- ARGV[19] what else holds for the topic's messages, see deliver.lua; mostly ''
-- ARGV[20...] the slot numbers; none: from 0 on
-- Returns {now in microseconds, 1 if something that is due was left (of a pop that may take nothing:
--          {step index, store score, ...} of it),
--          {slot index, step index, id, store score, envelope, ...}}; behind these, unless nothing of it
--          has happened and the wake index is on this node:
--          {slot index, id without a body, or of what was acknowledged while it ran, ...}, ids rolled back, ids that died,
--          {slot index, id that DeadQueue dropped, ...}, {slot index, id that has expired, ...},
--          announcements, settled}
-- In place of the id of a message that was delivered before, or has traits: {id, token}. Of the
-- others, the name is the token.
--
-- Steps in their order, and within a step by score over all the slots. Whatever the horizon
-- has passed is settled in the wake index, and each slot's next time is announced. (Of a slot with
-- more that is due, an announcement that nobody has claimed yet serves as that.) A slot that holds
-- nothing more has nothing announced.
--@ clock admitted

-- This is the hot path of each consumer: what few pops need is defined where it is needed, numbers go to
-- Redis as texts of integers, which are made faster, and texts become numbers where they are added to.
local call, keys = redis.call, KEYS
local slots, steps = tonumber(ARGV[1]), tonumber(ARGV[2])
local soon, late = tonumber(ARGV[3]), tonumber(ARGV[5])
local behind = slots * (6 + steps)
local given, wake = keys[behind + 1], keys[behind + 2]
local now = clock()
local now_ms = (now - now % 1000) / 1000
local late_us = now - tonumber(ARGV[6])
local passed = soon > 0 and now + tonumber(ARGV[4]) or late_us
local horizon, late_score = due_score(passed), due_score(late_us)
local rolled, died, bare, dropped, expired = {}, {}, {}, {}, {}
local untried = tonumber(ARGV[8])
local special = ARGV[19] ~= '' and ARGV[19] ~= 'far,'

-- A list with room for what few slots have: one that grows is copied again and again.
local function list() return {nil, nil, nil, nil, nil, nil, nil, nil} end

local function key(slot, part) return keys[6 * slot - 6 + part] end
local function store(slot, step) return keys[(5 + step) * slots + slot] end

-- What a pop needs that rolls back leases, has terms, or gives a message that was delivered before.
local visibility, terms, more = tonumber(ARGV[7])
local function know_more()
--< failure
--< token
--< lease
--< sorted
--< deliver
--< recover
  more = {deliver = deliver, is_still = is_still, note_longest = note_longest, roll_back = roll_back,
    drop_dead = drop_dead}
  terms = read_terms(ARGV[7], ARGV[19])

  function more.slot_at(number)
    local slot = slot_from(6 * number - 5, 0)
    for step = 1, steps do slot.stores[step] = store(number, step) end
    return slot
  end

  function more.add(list, number, ids)
    for i = 1, #ids do
      list[#list + 1], list[#list + 2] = number - 1, ids[i]
    end
  end

  -- Takes out of a slot what has expired by `due_ms`, of each step among so many as are delivered and a
  -- hundred others; or one message, to be dead with this score.
  function more.expire_slot(slot, due_ms, id, score)
    local gone = {id}
    if id then
      expire(more.slot_at(slot), id, score, terms.drop)
    else
      expire_waiting(more.slot_at(slot), 100, due_ms, now_ms, terms, untried, gone)
    end
    more.add(expired, slot, gone)
  end
end
if ARGV[19] ~= '' then know_more() end

-- What a pop of a backlog needs seldom.
local waking
local function know_wake()
--< wake
  waking = {announce = announce, announce_if_first = announce_if_first, settle = settle,
    said = said, unsaid = unsaid}
end

if ARGV[9] ~= '0' then
  know_more()
  local recover, until_score = tonumber(ARGV[9]), math.min(now_ms, math.floor(ARGV[15] / 1000)) * 1000 + 999
  local over = {}
  for number = 1, slots do
    local slot = more.slot_at(number)
    more.roll_back(slot, recover, until_score, now_ms, tonumber(ARGV[10]), tonumber(ARGV[11]), untried,
      rolled, died, over)
    more.add(bare, number, over)
    if over[1] then over = {} end
    more.add(dropped, number,
      more.drop_dead(slot, recover, now_ms, tonumber(ARGV[12]), tonumber(ARGV[13])))
  end
end

if terms and terms.ttl then
  for slot = 1, slots do more.expire_slot(slot, now_ms - terms.ttl) end
end

local most = math.max(soon, late)
local taken, left = 0, 0
local tell, told = most == 0 and tonumber(ARGV[14]) or 0, {}
-- Of what is taken: slot, step, id, score, ...
local order = {nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil}
local own = list() -- per slot that something is taken of: the ids, in their order

-- Of each slot: what was last read of its StoreQueue, where in that the next message is, and the score
-- that comes next, or false. Whether any slot has lanes; how many steps are looked at.
local lists, at, heads, laned, used = list(), list(), list(), false, 1

for step = 1, steps do
  -- A slot's fair share at a time, and the next: a score is what costs most, more than to ask again.
  local chunk = math.max(math.floor((most - taken) / slots) + 1, tell)

  local got = {} -- of each slot that it was read of again, how much was before

  local function read(slot, from, to)
    local some = call('ZRANGE', store(slot, step), from, to, 'WITHSCORES')
    local head = some[2] and some[2] + 0
    if laned or head and head < 0 then
      -- It waits in a lane (lanes.lua). Who calls does not know yet that the topic is limited.
      some = call('ZRANGEBYSCORE', store(slot, step), 0, '+inf', 'WITHSCORES', 'LIMIT', from, chunk)
      head, laned = some[2] and some[2] + 0, true
    end
    lists[slot], at[slot], heads[slot] = some, 1, head or false
  end

  local to = string.format('%d', chunk - 1)
  for slot = 1, slots do read(slot, '0', to) end
  while true do
    local first, score
    for slot = 1, slots do
      local head = heads[slot]
      if head and head <= horizon and (not first or head < score) then
        first, score = slot, head
      end
    end
    if not first then break end
    local some, i = lists[first], at[first]
    if taken >= most or (taken >= soon and score > late_score) then
      for n = 2, tell > 0 and #some or 0, 2 do
        score = tonumber(some[n])
        if score > horizon or #told == 2 * tell then break end
        local at = #told
        told[at + 1], told[at + 2] = step - 1, score
      end
      left = 1
      break
    end
    local n, ids = 4 * taken, own[first]
    taken = taken + 1
    order[n + 1], order[n + 2], order[n + 3], order[n + 4] = first, step, some[i], score
    if ids then
      ids[#ids + 1] = some[i]
    else
      own[first] = {some[i]}
    end
    if some[i + 2] then
      at[first], heads[first] = i + 2, some[i + 3] + 0
    elseif #some == 2 * chunk then
      got[first] = (got[first] or 0) + chunk
      read(first, string.format('%d', got[first]), string.format('%d', got[first] + chunk - 1))
    else
      heads[first] = false
    end
  end

  -- The first step nearly always has something, the others rarely. They make no difference to a pop that
  -- may take no more and leaves in each slot what is due.
  if step == 1 and steps > 1 then
    local matter = taken < most or tell > 0
    for slot = 1, slots do matter = matter or not heads[slot] or heads[slot] > horizon end
    if matter and call('EXISTS', unpack(keys, 7 * slots + 1, behind)) > 0 then used = steps end
  end
  if step == used then break end
end

-- All is read before anything is written, for this may fail. Of the envelopes of a slot, up to three more
-- are read than the reply may have.
local name, lease = ARGV[16], now_ms + visibility
local usual = string.format('%d', lease * 1000 + untried)
local leases, births, again, at = list(), list(), {}, 0
local messages = {nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil}
local old = {} -- of what has expired: slot, score in DeadQueue, id
local envelopes, tokens, seen, budget = list(), list(), list(), tonumber(ARGV[18])
for number = 1, taken do
  local i = 4 * number - 3
  local slot, step, id, score = order[i], order[i + 1], order[i + 2], order[i + 3]
  local place = (seen[slot] or 0) + 1
  seen[slot] = place
  local ids = own[slot]
  if place % 4 == 1 then
    envelopes[slot] = call('HMGET', keys[6 * slot - 3], unpack(ids, place, math.min(place + 3, #ids)))
  end
  local envelope = envelopes[slot][(place - 1) % 4 + 1]
  budget = budget - (envelope and #envelope or 0)
  if envelope and budget < 0 and number > 1 then -- also what is smaller and comes later
    for last = 4 * taken, i + 3, -4 do
      local slot = order[last - 3]
      table.remove(own[slot])
      if order[last - 2] == used then heads[slot] = order[last] end
      for field = last, last - 3, -1 do order[field] = nil end
    end
    taken, left = number - 1, 1
    break
  end
  if place % 1000 == 1 then
    tokens[slot] = call('HMGET', keys[6 * slot], unpack(ids, place, math.min(place + 999, #ids)))
  end
  local token = tokens[slot][(place - 1) % 1000 + 1]
  if envelope then
    local low = score % 1000
    local retries = low < 32 and low or untried
    local birth, ends = name, lease
    if token then
      if not more then know_more() end
      if not more.is_still(token, score) then token = nil end
    end
    if token or special then birth, ends = more.deliver(token, score, name, now_ms, terms) end
    if birth then
      local part, named = leases[slot], births[slot]
      ends = ends == lease and step == 1 and retries == untried and usual
        or string.format('%d', ends * 1000 + 32 * (step - 1) + retries)
      if part then
        local n = #part
        part[n + 1], part[n + 2], named[n + 1], named[n + 2] = ends, id, id, birth
      else
        leases[slot], births[slot] = {ends, id}, {id, birth}
      end
      messages[at + 1], messages[at + 2], messages[at + 3] = slot - 1, step - 1, id
      if birth ~= name then
        again[#again + 1], again[#again + 2] = i, birth
        messages[at + 3] = {id, birth}
      end
      messages[at + 4], messages[at + 5] = score, envelope
      at = at + 5
    else
      local n = #old
      old[n + 1], old[n + 2], old[n + 3] = slot, now_ms * 1000 + 32 * (step - 1) + retries, id
    end
  else
    bare[#bare + 1], bare[#bare + 2] = slot - 1, id
  end
end
if used == 1 and not laned then -- the first ones of each slot
  for slot, ids in pairs(own) do
    if ids[1] then call('ZREMRANGEBYRANK', store(slot, 1), '0', ids[2] and #ids - 1 or '0') end
  end
else
  for i = 1, 4 * taken, 4 do
    call('ZREM', store(order[i], order[i + 1]), order[i + 2])
  end
end
for i = 1, #bare, 2 do
  redis.call('HDEL', key(bare[i] + 1, 5), bare[i + 1])
  redis.call('HDEL', key(bare[i] + 1, 6), bare[i + 1])
end
if ARGV[17] ~= '0' and at > 0 then
  local gives = name .. '\n' .. cmsgpack.pack({order, again}) -- for recall.lua
  local known = call('SET', given, gives, 'EX', ARGV[17], 'GET')
  if known and string.sub(known, 1, #name + 1) == name .. '\n' then
    -- It has run already, or its consumer waits for it no more: all is as it was.
    redis.call('SET', given, known, 'EX', ARGV[17])
    for i = 1, 4 * taken, 4 do
      redis.call('ZADD', store(order[i], order[i + 1]), order[i + 3], order[i + 2])
    end
    return {now, 1, {}, bare, rolled, died, dropped, expired, {}, {}}
  end
end
local looked = {}
for i = 1, #old, 3 do
  local slot = old[i]
  more.expire_slot(slot, now_ms, old[i + 2], old[i + 1])
  if not looked[slot] then -- where one has, more may have
    looked[slot] = true
    more.expire_slot(slot, now_ms)
    heads[slot] = tonumber(redis.call('ZRANGE', store(slot, used), 0, 0, 'WITHSCORES')[2] or '')
  end
end
for slot, part in pairs(leases) do
  in_parts('ZADD', key(slot, 2), part)
  if terms and terms.far then more.note_longest(key(slot, 6), visibility) end
  in_parts('HSET', key(slot, 6), births[slot])
end

local open -- slots with an announcement up to then that nobody has claimed
local function is_open(slot, number)
  if not wake then return ARGV[14] == '0' and call('ZCOUNT', key(slot, 1), '-inf', passed) > 0 end
  if not open then
    open = {}
    local unclaimed = call('ZRANGEBYSCORE', wake, '-inf', string.format('%d', passed), 'LIMIT', '0', ARGV[1] .. '0')
    for i = 1, #unclaimed do open[string.match(unclaimed[i], '^%d+') + 0] = true end
  end
  return open[number + 0]
end

local empty = {}
for slot = 1, slots do
  local armed, number = key(slot, 1), ARGV[19 + slot] or slot - 1
  local first = heads[slot]
  for step = 1, used - 1 do
    local head = tonumber(redis.call('ZRANGE', store(slot, step), 0, 0, 'WITHSCORES')[2])
    if head and head >= 0 and (not first or head < first) then first = head end
  end
  if first then
    -- Of what is due, the time is needed only if it is to be announced.
    local us = first > horizon and action_time(first) or first < 33 and now
    if us and us > passed or not is_open(slot, number) then
      us = us or action_time(first)
      if not waking then know_wake() end
      local announced = tonumber(redis.call('ZRANGE', armed, '0', '0')[1] or '')
      if not announced then
        waking.announce(wake, armed, number, us)
      elseif announced <= passed or announced > us then
        waking.settle(wake, armed, number, passed)
        waking.announce_if_first(wake, armed, number, us, now)
      end
    end
  else
    empty[#empty + 1] = slot
  end
end
if #told > 0 then left = told end
if empty[1] then
  local stale = {}
  for i = 1, #empty do stale[i] = key(empty[i], 1) end
  if call('EXISTS', unpack(stale)) > 0 then
    if not waking then know_wake() end
    for i = 1, #empty do waking.settle(wake, stale[i], ARGV[19 + empty[i]] or empty[i] - 1, '+inf') end
  end
end
if wake and not (bare[1] or rolled[1] or died[1] or dropped[1] or expired[1]) then
  return {now, left, messages}
end
return {now, left, messages, bare, rolled, died, dropped, expired, waking and waking.said or {}, waking and waking.unsaid or {}}
