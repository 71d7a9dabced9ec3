-- Settles which edition of a source's schedules is in force, and who puts it. A source is an app;
-- an edition is all that one release of it has to put.
--
-- KEYS[1] the source's edition in force   KEYS[2] its former editions
-- ARGV[1] what: 'use', 'force', 'renew' or 'done'
-- ARGV[2] edition   ARGV[3] release, or ''   ARGV[4] name of the process
-- ARGV[5] milliseconds for which the process has looked
-- ARGV[6] milliseconds after which an edition that nobody uses gives way to a former one
-- ARGV[7] milliseconds for which the process may put it
-- Returns {verdict, generation, edition in force, its release, the process that put it,
-- milliseconds since a process used it, milliseconds for which another one may put}. Verdicts:
-- 'put' the process is to put it, or to go on | 'in force' it is, and all of it is put
-- 'busy' another process is putting one: ask again | 'former' another one is in force
--
-- 'use' asks, and notes that the edition is in use: a later release goes before an earlier one,
-- and of one release the edition that came last. 'force' asks for an edition that is to be put
-- whatever is in force; releases that are later and were in force stay out then, for their processes
-- may go on. 'renew' goes on with putting; 'done' ends it, unless all is to be put once
-- more: a process that says 'renew' or 'done' too late may have put something late. Keeps 100 former
-- editions.
--@ clock

local MOST = 100
local what, edition, release, process = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local looked, unused, ttl = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local now = math.floor(clock() / 1000)

local found = redis.call('HMGET', KEYS[1], 'edition', 'release', 'generation', 'process', 'used',
  'putter', 'until', 'done', 'doubt', 'back')
local force, its, generation = found[1], found[2] or '', tonumber(found[3] or 0)
local used, till = tonumber(found[5] or 0), tonumber(found[7] or 0)
local mine = found[6] == process and till > now
-- If it were longer, the clock was set back, and who puts may be dead.
local busy = found[6] ~= process and till > now and till <= now + ttl

local function order(text) -- numbers count as numbers; hexadecimal, so that no locale matters
  local padded = string.gsub(text, '%d+', function(digits)
    return string.rep('0', 20 - #digits) .. digits
  end)
  return (string.gsub(padded, '.', function(c) return string.format('%02x', string.byte(c)) end))
end

local function answer(verdict)
  return {verdict, generation, force or '', its, found[4] or '', math.max(now - used, 0),
    busy and till - now or 0}
end

-- Redis refuses what takes memory when it is full, but not after a script's first write.
redis.call('ZREM', KEYS[2], '')
if used > now then redis.call('HSET', KEYS[1], 'used', now) end
if what == 'renew' or what == 'done' then
  if force ~= edition or not mine then
    redis.call('HSET', KEYS[1], 'doubt', 1)
    return answer(busy and 'busy' or 'former')
  end
  if what == 'done' and not found[9] then
    redis.call('HSET', KEYS[1], 'until', 0, 'used', now, 'done', generation)
    return answer('in force')
  end
  redis.call('HSET', KEYS[1], 'until', now + ttl, 'used', now)
  if what == 'done' then redis.call('HDEL', KEYS[1], 'doubt') end
  return answer('put')
end
if force == edition then
  used = now
  redis.call('HSET', KEYS[1], 'used', now)
  if order(release) > order(its) then
    its = release
    redis.call('HSET', KEYS[1], 'release', release)
  end
  if what ~= 'force' and not found[9] and tonumber(found[8] or 0) == generation then
    return answer('in force')
  end
elseif force and what ~= 'force' then
  local one, other = order(release), order(its)
  local known = redis.call('ZSCORE', KEYS[2], edition)
  local later = one > other or one == other and not known
  if later and known and found[10] and one <= order(found[10]) then later = false end
  if not later and (now - used <= unused or looked <= unused) then return answer('former') end
end
if busy then return answer('busy') end
if force ~= edition then
  if force then redis.call('ZADD', KEYS[2], now, force) end
  redis.call('ZREM', KEYS[2], edition)
  -- Up to which release others were taken back by force.
  local taken_back = found[10] or its
  if order(its) > order(taken_back) then taken_back = its end
  if what == 'force' and order(taken_back) > order(release) then
    redis.call('HSET', KEYS[1], 'back', taken_back)
  else
    redis.call('HDEL', KEYS[1], 'back')
  end
  local beyond = redis.call('ZRANGE', KEYS[2], 0, -MOST - 1)
  if #beyond > 0 then redis.call('ZREM', KEYS[2], unpack(beyond)) end
  force, its, generation, used, found[4] = edition, release, generation + 1, now, process
  redis.call('HSET', KEYS[1], 'edition', edition, 'release', release, 'generation', generation,
    'process', process, 'used', now)
end
redis.call('HDEL', KEYS[1], 'doubt')
redis.call('HSET', KEYS[1], 'putter', process, 'until', now + ttl)
return answer('put')
