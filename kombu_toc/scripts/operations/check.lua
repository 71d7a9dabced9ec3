-- Looks at a part of a slot for what cannot be, a bounded number of ids at a time; mends it if
-- told to. What it looks at does not change meanwhile, so a topic may be live.
--
-- KEYS[1] armed   KEYS[2] prepare   KEYS[3] body   KEYS[4] dead   KEYS[5] reasons
-- KEYS[6] tokens   KEYS[7...] store (one per priority step), then the stores of steps that the
-- topic has not
-- then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number
-- ARGV[3] which of the KEYS to look through; 1: whether the slot's next time is announced
-- ARGV[4] cursor; '0' at first       ARGV[5] about how many ids
-- ARGV[6] 1: mend                    ARGV[7] score of what is buried, beside the time
-- ARGV[8...] per step that the topic has not: the index of the step that stands for it
-- Returns {next cursor, '0' at the end, {kind, id, {numbers of the KEYS that have it}, ...},
--          bytes of envelopes that Redis has read, announcements, settled}
-- Kinds: 1 an id without a body: removed   2 a body without an id: to DeadQueue
-- 3 an id in several places: in prepare it stays, else in store   4 a reason of no message: removed
-- 5 the slot's next time is not announced: it is
-- 6 an id that waits under a step that the topic has not, where nobody looks: it gets another
-- 7 a token of no message: removed   8 an id that waits in a lane that has it not: entered there
--@ clock admitted wake failure token lease sorted push unlimited

local steps, part, mend = tonumber(ARGV[1]), tonumber(ARGV[3]), ARGV[6] == '1'
local slot, cursor, count = ARGV[2], ARGV[4], ARGV[5]
local last = 6 + steps + #ARGV - 7 - (limited and limited.args or 0)
local wake = KEYS[last + 1 + (limited and limited.keys or 0)]
local now, faults = clock(), {}
local moved -- the earliest action time of what was given a step

local function fault(...) push(faults, ...) end -- its kind, the id, and the places

local stores = {unpack(KEYS, 7, 6 + steps)}
if limited then limited.open(KEYS[1], KEYS[2], stores, slot) end

if part == 1 then
  local us = limited and limited.next_start(now)
  for step = 1, limited and 0 or steps do
    local head = redis.call('ZRANGE', KEYS[6 + step], 0, 0, 'WITHSCORES')[2]
    if head and (not us or action_time(tonumber(head)) < us) then us = action_time(tonumber(head)) end
  end
  local said_first = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if us and (not said_first or tonumber(said_first) > math.max(us, now)) then
    fault(5, '', {})
    if mend then announce(wake, KEYS[1], slot, math.max(us, now), said_first) end
  end
  return {'0', faults, 0, said, unsaid}
end

local hash = part == 3 or part == 5 or part == 6
local bytes = 0
local page = redis.call(hash and 'HSCAN' or 'ZSCAN', KEYS[part], cursor, 'COUNT', count)
for i = 1, #page[2], 2 do -- each followed by a value or a score
  local id = page[2][i]
  if part == 3 then bytes = bytes + #page[2][i + 1] end
  local places = {}
  for place = 2, last do
    if place ~= 3 and place ~= 5 and place ~= 6 and redis.call('ZSCORE', KEYS[place], id) then
      places[#places + 1] = place
    end
  end
  local body = redis.call('HEXISTS', KEYS[3], id) == 1
  if part == 5 or part == 6 then
    if #places == 0 and not body and id ~= LONGEST then
      fault(part == 5 and 4 or 7, id, {part})
      if mend then redis.call('HDEL', KEYS[part], id) end
    end
  elseif not body then
    fault(1, id, places)
    if mend then
      for j = 1, #places do redis.call('ZREM', KEYS[places[j]], id) end
      redis.call('HDEL', KEYS[5], id)
      local token = limited and redis.call('HGET', KEYS[6], id) or ''
      redis.call('HDEL', KEYS[6], id)
      if limited then limited.leave(id, token, true, now, places[1] ~= 2) end
    end
  elseif #places == 0 then
    fault(2, id, {3})
    if mend then
      bury(KEYS[4], KEYS[5], id, math.floor(now / 1000) * 1000 + tonumber(ARGV[7]),
        'found in no queue: its entry was lost', '')
    end
  elseif #places > 1 and part == 3 then
    fault(3, id, places)
    if mend then
      local stays = places[#places]
      for j = #places, 1, -1 do
        if stays > 6 + steps and places[j] > 6 then stays = places[j] end
      end
      if places[1] == 2 then stays = 2 end
      for j = 1, #places do
        if places[j] ~= stays then redis.call('ZREM', KEYS[places[j]], id) end
        if places[j] == 4 then redis.call('HDEL', KEYS[5], id) end -- it has not died
      end
    end
  elseif part > 6 + steps and #places == 1 then
    fault(6, id, places)
    if mend then
      local score = redis.call('ZSCORE', KEYS[part], id)
      redis.call('ZREM', KEYS[part], id)
      score = plain_score(tonumber(score)) -- what waited in a lane has none under this step
      redis.call('ZADD', KEYS[7 + ARGV[part - 6 - steps + 7]], score, id)
      local us = action_time(tonumber(score))
      moved = moved and math.min(moved, us) or us
    end
  elseif limited and part > 6 and part <= 6 + steps and tonumber(page[2][i + 1]) < 0
      and not limited.has_entry(id, part - 6, redis.call('HGET', KEYS[6], id), page[2][i + 1], now, mend) then
    fault(8, id, {part})
  end
end
if moved then announce_if_first(wake, KEYS[1], slot, moved == 0 and now or moved, now) end
if mend and limited then limited.announce(wake, now) end
if mend and #faults > 0 then settle_if_empty(wake, KEYS[1], slot, stores) end
return {page[1], faults, bytes, said, unsaid}
