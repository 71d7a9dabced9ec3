-- Fragment: what limits are to a put: how many messages may be put, of a topic and of each key; and where one
-- goes whose key takes turns.
--
-- A sorted set has, per key, the time up to which what may be put is used up (the generic cell rate
-- algorithm); ':', which no key is, stands for the whole topic. Who puts at most so many at that rate
-- is never ahead of the clock by more than all that may be put at once takes.

-- How long it is, in microseconds, until one more message of a key ('' for none) may be put, and which
-- limit says so; 0 for now: then `paid` has what `pay` writes.
--
-- limits: Declaration.put_gates (kombu_toc/model/limits.py); behind a '!', what is put in any case, and
--         uses up what may be put: nobody else puts more until that is over
local function toll(limits, pace, key, now, paid)
  local longest, which, wanted, owes = 0, '', {}, string.byte(limits) == 33
  for kind, us, burst in string.gmatch(limits, '([pP])([%d.]+):(%d+),') do
    local member = kind == 'p' and ':' or key
    if member ~= '' then
      us, burst = tonumber(us), tonumber(burst)
      local used = paid[member] or tonumber(redis.call('ZSCORE', pace, member) or 0)
      -- It cannot be more, unless the clock was set back or the limit was changed: then it goes on here.
      if used > now + us * burst + 1 then used = now + us * (burst - 1) end
      used = math.max(now, owes and math.min(used, now + us * (burst - 1)) or used)
      local wait = math.ceil(used - now - us * (burst - 1) - 1)
      if wait > longest then longest, which = wait, kind end
      wanted[member] = used + us
    end
  end
  if longest == 0 then
    for member, used in pairs(wanted) do paid[member] = used end
  end
  return longest, which
end

-- To be called after the script's first write that takes memory: a full server refuses that one.
local function pay(limits, pace, now, paid)
  local lasts, count = 0, 0
  for us, burst in string.gmatch(limits, '[pP]([%d.]+):(%d+),') do lasts = math.max(lasts, us * burst) end
  for member, used in pairs(paid) do
    redis.call('ZADD', pace, used, member)
    count = count + 1
  end
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', pace, '-inf', now, 'LIMIT', 0, 2 * count + 2)) do
    redis.call('ZREM', pace, member)
  end
  redis.call('PEXPIRE', pace, math.ceil(lasts / 1000) + 1000)
end

-- The key that the traits of a message name, '' for none.
local function key_in(traits) return string.match(traits, '[;,]k([%w_.%%-]+)') or '' end

-- Where keys take turns, a message that is due at once goes to its lane (lanes.lua), so that its key has a turn
-- however many others wait. The next pop finds out whether the key may start something, and where its turn is.
local function enter_lane(store, lanes, turns, waits, step, score, key, id)
  redis.call('ZADD', store, score > 31 and -score or -score - 1, id)
  redis.call('ZADD', lanes, 0, key .. '\0' .. string.format('%02d%016.0f', step, score) .. '\0' .. id)
  if not redis.call('ZSCORE', waits, key) then redis.call('ZADD', turns, 'NX', score, key) end
end
