-- Fragment: where among the waiting messages a new one goes.
--
-- Messages with one action time keep the order in which they were put, however many there are: a
-- millisecond holds 968 of them, the rest spills into the next ones, and each is less than 1.4 ms late
-- per 968 that have its time or one within those milliseconds.

-- The score for a message whose action time has `score`: behind the last one that has this time or a
-- later one of the same millisecond; a millisecond that is full spills into the next.
local function free_score(store, score, keyed)
  local first = math.floor(score / 1000)
  local function last_up_to(ms) -- the highest score from this time on
    local last = redis.call('ZREVRANGEBYSCORE', store, ms * 1000 + 999, score, 'WITHSCORES', 'LIMIT', 0, 1)[2]
    last = last and tonumber(last)
    local laned = keyed and redis.call('ZRANGEBYSCORE', store, -(ms * 1000 + 999), -score, 'WITHSCORES', 'LIMIT', 0, 1)[2]
    return laned and math.max(last or 0, -tonumber(laned)) or last
  end
  local function is_full(number) -- of milliseconds from here on, on the whole
    local count = redis.call('ZCOUNT', store, score, (first + number) * 1000 + 999)
    return 4 * count >= 3 * 968 * number
  end
  local last = last_up_to(first)
  -- It is full with fewer, too, if it was before some of the last of them were taken out.
  if last and last % 1000 >= 900 and (last % 1000 == 999 or is_full(1)) then
    -- Where the messages end that have filled this millisecond and those behind it: where three
    -- quarters of the places up to there are no longer taken. (What was taken out of them leaves no
    -- gap that a later one might get into, and what lies behind them for its own reasons is overtaken.)
    local full, room = 0, 1
    while is_full(room) do full, room = room, 2 * room end
    while room - full > 1 do
      local middle = math.floor((full + room) / 2)
      if is_full(middle) then full = middle else room = middle end
    end
    -- The last places of a millisecond may be taken by others although there is room in it.
    for number = room, room + 64 do
      last = last_up_to(first + number)
      if last < (first + number) * 1000 + 999 then break end
    end
  end
  if not last then return score end
  score = last + 1
  if score % 1000 == 0 then score = score + 32 end
  return score
end
