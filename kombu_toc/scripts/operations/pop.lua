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
--@ clock

-- This is the hot path of each consumer: what few pops need is defined where it is needed, numbers go to
-- Redis as texts of integers, which are made faster, and texts become numbers where they are added to.
-- A table that grows is copied, so it has room for what pops mostly give.
local call, keys, args = redis.call, KEYS, ARGV
local slots, steps, soon, late = args[1] + 0, args[2] + 0, args[3] + 0, args[5] + 0
local behind = slots * (6 + steps)
local given, wake = keys[behind + 1], keys[behind + 2]
local now = clock()
local now_ms, late_us = (now - now % 1000) / 1000, now - args[6]
local passed = soon > 0 and now + args[4] or late_us
local horizon, late_score = due_score(passed), due_score(late_us)
local none = {}
local rolled, died, bare, dropped, expired = none, none, none, none, none
local visibility, untried, tail = args[7] + 0, args[8] + 0, args[19]
local special = tail ~= '' and tail ~= 'far,'

-- What a pop needs that rolls back leases, has terms, or gives a message that was delivered before; and
-- the terms. It names nothing of the script, or that would be kept for it by each pop.
local more, terms
local function know_more(keys, args, slots, steps, now_ms, untried)
--< clock
--< admitted
--< failure
--< token
--< lease
--< sorted
--< deliver
--< recover
  local more = {deliver = deliver, is_still = is_still, note_longest = note_longest, roll_back = roll_back,
    drop_dead = drop_dead}
  local terms = read_terms(args[7], args[19])

  function more.slot_at(number)
    local slot = slot_from(6 * number - 5, 0)
    for step = 1, steps do slot.stores[step] = keys[(5 + step) * slots + number] end
    return slot
  end

  function more.add(list, number, ids)
    for i = 1, #ids do
      list[#list + 1], list[#list + 2] = number - 1, ids[i]
    end
  end

  -- Takes out of a slot what has expired by `due_ms`, of each step among so many as are delivered and a
  -- hundred others; or one message, to be dead with this score.
  function more.expire_slot(expired, slot, due_ms, id, score)
    local gone = {id}
    if id then
      expire(more.slot_at(slot), id, score, terms.drop)
    else
      expire_waiting(more.slot_at(slot), 100, due_ms, now_ms, terms, untried, gone)
    end
    more.add(expired, slot, gone)
  end
  return more, terms
end

-- What a pop of a backlog needs seldom.
local waking
local function know_wake()
--< clock
--< admitted
--< wake
  return {announce = announce, announce_if_first = announce_if_first, settle = settle, said = said, unsaid = unsaid}
end

if tail ~= '' or args[9] ~= '0' then
  more, terms = know_more(keys, args, slots, steps, now_ms, untried)
  rolled, died, bare, dropped, expired = {}, {}, {}, {}, {}
end
if args[9] ~= '0' then
  local recover, until_score = args[9] + 0, math.min(now_ms, math.floor(args[15] / 1000)) * 1000 + 999
  local over = {}
  for number = 1, slots do
    local slot = more.slot_at(number)
    more.roll_back(slot, recover, until_score, now_ms, args[10] + 0, args[11] + 0, untried, rolled, died, over)
    more.add(bare, number, over)
    if over[1] then over = {} end
    more.add(dropped, number, more.drop_dead(slot, recover, now_ms, args[12] + 0, args[13] + 0))
  end
end

if terms and terms.ttl then
  for slot = 1, slots do more.expire_slot(expired, slot, now_ms - terms.ttl) end
end

local most = soon > late and soon or late
local taken, left = 0, 0
local tell, told = most == 0 and args[14] + 0 or 0, nil
-- Of what is taken: slot, step, id, score, ...
local order = {nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil}
-- Per slot that something is taken of: the ids, in their order; how many of them were looked at, and what was
-- read of these last, envelopes and tokens; what is to be written to `prepare` and to `tokens`.
local own, SEEN, BODIES, TOKENS, LEASES, BIRTHS = {nil}, 2, 3, 4, 5, 6

-- Of each slot: what was last read of its StoreQueue, where in that the next message is, and the score
-- that comes next, or false. Whether any slot has lanes; how many steps are looked at.
local lists, at, heads, laned, used = {nil}, {nil}, {nil}, false, 1

for step = 1, steps do
  -- A slot's fair share at a time, and the next: a score is what costs most, more than to ask again.
  local chunk, stores = (most - taken) / slots, (5 + step) * slots
  chunk = chunk - chunk % 1 + 1
  if chunk < tell then chunk = tell end

  local got = none -- of each slot that it was read of again, how much was before
  local reads, last, from, to = 1, slots, '0', string.format('%d', chunk - 1) -- the slots to be read, and what
  while true do
    for slot = reads, last do
      local some = call('ZRANGE', keys[stores + slot], from, to, 'WITHSCORES')
      local head = some[2] and some[2] + 0
      if laned or head and head < 0 then
        -- It waits in a lane (lanes.lua). Who calls does not know yet that the topic is limited.
        some = call('ZRANGEBYSCORE', keys[stores + slot], 0, '+inf', 'WITHSCORES', 'LIMIT', from, chunk)
        head, laned = some[2] and some[2] + 0, true
      end
      lists[slot], at[slot], heads[slot] = some, 1, head or false
    end
    reads, last = 1, 0
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
      if tell > 0 then told = told or {} end
      for n = 2, told and #some or 0, 2 do
        score = some[n] + 0
        if score > horizon or #told == 2 * tell then break end
        local at = #told
        told[at + 1], told[at + 2] = step - 1, score
      end
      left = 1
      break
    end
    local n, mine = 4 * taken, own[first]
    taken = taken + 1
    order[n + 1], order[n + 2], order[n + 3], order[n + 4] = first, step, some[i], score
    if mine then
      local ids = mine[1]
      ids[#ids + 1] = some[i]
    else
      own[first] = {{some[i], nil, nil, nil, nil, nil, nil, nil}, 0, false, false, false, false}
    end
    if some[i + 2] then
      at[first], heads[first] = i + 2, some[i + 3] + 0
    elseif #some == 2 * chunk then
      if got == none then got = {} end
      local before = (got[first] or 0) + chunk
      got[first], reads, last = before, first, first
      from, to = string.format('%d', before), string.format('%d', before + chunk - 1)
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
local name, lease = args[16], now_ms + visibility
local usual = string.format('%d', lease * 1000 + untried)
local again, at = none, 0
local messages = {nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil}
local old, budget = none, args[18] + 0 -- of what has expired: slot, score in DeadQueue, id
for number = 1, taken do
  local i = 4 * number - 3
  local slot, step, id, score = order[i], order[i + 1], order[i + 2], order[i + 3]
  local mine = own[slot]
  local ids, place = mine[1], mine[SEEN] + 1
  mine[SEEN] = place
  if place % 4 == 1 then
    mine[BODIES] = call('HMGET', keys[6 * slot - 3], unpack(ids, place, math.min(place + 3, #ids)))
  end
  local envelope = mine[BODIES][(place - 1) % 4 + 1]
  budget = budget - (envelope and #envelope or 0)
  if envelope and budget < 0 and number > 1 then -- also what is smaller and comes later
    for last = 4 * taken, i + 3, -4 do
      local slot = order[last - 3]
      table.remove(own[slot][1])
      if order[last - 2] == used then heads[slot] = order[last] end
      for field = last, last - 3, -1 do order[field] = nil end
    end
    taken, left = number - 1, 1
    break
  end
  if place % 1000 == 1 then
    mine[TOKENS] = call('HMGET', keys[6 * slot], unpack(ids, place, math.min(place + 999, #ids)))
  end
  local token = mine[TOKENS][(place - 1) % 1000 + 1]
  if envelope then
    local low = score % 1000
    local retries = low < 32 and low or untried
    local birth, ends = name, lease
    if token then
      if not more then more, terms = know_more(keys, args, slots, steps, now_ms, untried) end
      if not more.is_still(token, score) then token = nil end
    end
    if token or special then birth, ends = more.deliver(token, score, name, now_ms, terms) end
    if birth then
      ends = ends == lease and step == 1 and retries == untried and usual
        or string.format('%d', ends * 1000 + 32 * (step - 1) + retries)
      local part, named = mine[LEASES], mine[BIRTHS]
      if part then
        local n = #part
        part[n + 1], part[n + 2], named[n + 1], named[n + 2] = ends, id, id, birth
      else
        mine[LEASES] = {ends, id, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil}
        mine[BIRTHS] = {id, birth, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil}
      end
      messages[at + 1], messages[at + 2], messages[at + 3] = slot - 1, step - 1, id
      if birth ~= name then
        if again == none then again = {} end
        again[#again + 1], again[#again + 2] = i, birth
        messages[at + 3] = {id, birth}
      end
      messages[at + 4], messages[at + 5] = score, envelope
      at = at + 5
    else
      if old == none then old, expired = {}, expired == none and {} or expired end
      local n = #old
      old[n + 1], old[n + 2], old[n + 3] = slot, now_ms * 1000 + 32 * (step - 1) + retries, id
    end
  else
    if bare == none then bare = {} end
    bare[#bare + 1], bare[#bare + 2] = slot - 1, id
  end
end
if used == 1 and not laned then -- the first ones of each slot
  for slot, mine in pairs(own) do
    local last = #mine[1] - 1
    if last >= 0 then call('ZREMRANGEBYRANK', keys[6 * slots + slot], '0', string.format('%d', last)) end
  end
else
  for i = 1, 4 * taken, 4 do
    call('ZREM', keys[(5 + order[i + 1]) * slots + order[i]], order[i + 2])
  end
end
for i = 1, #bare, 2 do
  call('HDEL', keys[6 * bare[i] + 5], bare[i + 1])
  call('HDEL', keys[6 * bare[i] + 6], bare[i + 1])
end
if args[17] ~= '0' and at > 0 then
  local mark = name .. '\n'
  local known = call('SET', given, mark .. cmsgpack.pack({order, again}), 'EX', args[17], 'GET') -- for recall.lua
  if known and string.sub(known, 1, #mark) == mark then
    -- It has run already, or its consumer waits for it no more: all is as it was.
    call('SET', given, known, 'EX', args[17])
    for i = 1, 4 * taken, 4 do
      call('ZADD', keys[(5 + order[i + 1]) * slots + order[i]], order[i + 3], order[i + 2])
    end
    return {now, 1, {}, bare, rolled, died, dropped, expired, {}, {}}
  end
end
local looked = none
for i = 1, #old, 3 do
  local slot = old[i]
  more.expire_slot(expired, slot, now_ms, old[i + 2], old[i + 1])
  if looked == none then looked = {} end
  if not looked[slot] then -- where one has, more may have
    looked[slot] = true
    more.expire_slot(expired, slot, now_ms)
    heads[slot] = tonumber(call('ZRANGE', keys[(5 + used) * slots + slot], 0, 0, 'WITHSCORES')[2] or '')
  end
end
for slot, mine in pairs(own) do
  local part, named = mine[LEASES], mine[BIRTHS]
  for from = 1, part and #part or 0, 1000 do -- see admitted.lua
    local to = math.min(from + 999, #part)
    call('ZADD', keys[6 * slot - 4], unpack(part, from, to))
    call('HSET', keys[6 * slot], unpack(named, from, to))
  end
  if part and terms and terms.far then more.note_longest(keys[6 * slot], visibility) end
end

local open, empty -- slots with an announcement up to then that nobody has claimed; those without messages
for slot = 1, slots do
  local armed, number = keys[6 * slot - 5], args[19 + slot] or slot - 1
  local first = heads[slot]
  for step = 1, used - 1 do
    local head = tonumber(call('ZRANGE', keys[(5 + step) * slots + slot], 0, 0, 'WITHSCORES')[2])
    if head and head >= 0 and (not first or head < first) then first = head end
  end
  if first then
    -- Of what is due, the time is needed only if it is to be announced.
    local is_open = first <= horizon and (first > 32 or now <= passed)
    if is_open and not wake then
      is_open = args[14] == '0' and call('ZCOUNT', armed, '-inf', passed) > 0
    elseif is_open then
      if not open then
        open = {}
        local unclaimed = call('ZRANGEBYSCORE', wake, '-inf', string.format('%d', passed), 'LIMIT', '0', args[1] .. '0')
        for i = 1, #unclaimed do open[string.match(unclaimed[i], '^%d+') + 0] = true end
      end
      is_open = open[number + 0]
    end
    if not is_open then
      if not waking then waking = know_wake() end
      local us = first < 33 and first <= horizon and now or action_time(first)
      local announced = tonumber(call('ZRANGE', armed, '0', '0')[1] or '')
      if not announced then
        waking.announce(wake, armed, number, us)
      elseif announced <= passed or announced > us then
        waking.settle(wake, armed, number, passed)
        waking.announce_if_first(wake, armed, number, us, now)
      end
    end
  else
    empty = empty or {}
    empty[#empty + 1] = slot
  end
end
if told and told[1] then left = told end
if empty then
  local stale = {}
  for i = 1, #empty do stale[i] = keys[6 * empty[i] - 5] end
  if call('EXISTS', unpack(stale)) > 0 then
    if not waking then waking = know_wake() end
    for i = 1, #empty do waking.settle(wake, stale[i], args[19 + empty[i]] or empty[i] - 1, '+inf') end
  end
end
if wake and not (bare[1] or rolled[1] or died[1] or dropped[1] or expired[1]) then
  return {now, left, messages}
end
return {now, left, messages, bare, rolled, died, dropped, expired, waking and waking.said or {}, waking and waking.unsaid or {}}
