-- Fragment: where among the waiting messages a new one goes.
--
-- Messages with one action time keep the order in which they were put, however many there are: a
-- millisecond holds 968 of them, the rest spills into the next ones, and each is less than 1.4 ms late
-- per 968 that have its time or one within those milliseconds.

-- When a message is due that is put with this time: a moment, `+` and microseconds from now, both, or
-- nothing. Who sends a countdown knows the clock from before, and the way here takes some time: but not
-- longer than a millisecond more than it did lately. Else the clock has been set since, or the way was
-- long, and the countdown begins here: then it is not early, at least.
local function due_at(now, text)
  if text == '' then return now end
  local moment, left = string.match(text, '^(%d*)%+?(%d*)$')
  local at = tonumber(moment)
  if left ~= '' and not (at and math.abs(now + left - at) <= 1000) then at = now + left end
  return math.max(at, now)
end

-- The score for a message whose action time has `score`: behind the last one that has this time or a
-- later one of the same millisecond; a millisecond that is full spills into the next. `last` is the score of
-- that last one, if it is known.
local function free_score(store, score, keyed, last)
  local first = math.floor(score / 1000)
  local function last_up_to(ms) -- the highest score from this time on
    local last = redis.call('ZREVRANGEBYSCORE', store, ms * 1000 + 999, score, 'WITHSCORES', 'LIMIT', 0, 1)[2]
    last = last and tonumber(last)
    local laned = keyed and redis.call('ZRANGEBYSCORE', store, -(ms * 1000 + 999), -score, 'WITHSCORES', 'LIMIT', 0, 1)[2]
    return laned and math.max(last or 0, -tonumber(laned)) or last
  end
  -- How many milliseconds would be filled, to three quarters, by what lies in so many from here on.
  local function filled(number)
    return math.floor(redis.call('ZCOUNT', store, score, (first + number) * 1000 + 999) / 726)
  end
  last = last or last_up_to(first)
  if not last then return score end
  if last % 1000 >= 900 then
    -- Where the messages end that have filled this millisecond and those behind it: where three
    -- quarters of the places up to there are no longer taken. (What was taken out of them leaves no
    -- gap that a later one might get into, and what lies behind them for its own reasons is overtaken.)
    local here, full, room = last, 0, 8
    local there = filled(room)
    while there >= room do full, room, there = room, 8 * room, filled(8 * room) end
    last = last_up_to(first + room)
    if math.floor(last / 1000) - first > there then -- as a rule nothing else is near, and it is one of them
      room = there + 1 -- mostly right behind the last that is full
      while room - full > 1 do
        if filled(there) >= there then full = there else room = there end
        there = math.floor((full + room) / 2)
      end
      last = room == 1 and here % 1000 < 999 and here or last_up_to(first + room)
    end
    -- It is full with fewer, too, if it was before some of the last of them were taken out; and the last
    -- places of a millisecond may be taken by others although there is room in it.
    for number = room + 1, room + 64 do
      if last < (first + number - 1) * 1000 + 999 then break end
      last = last_up_to(first + number)
    end
  end
  score = last + 1
  if score % 1000 == 0 then score = score + 32 end
  return score
end
