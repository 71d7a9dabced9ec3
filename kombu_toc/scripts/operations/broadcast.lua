-- Appends a message to the streams of an exchange that somebody reads.
--
-- KEYS[1] bindings of the exchange   KEYS[2] its stream   KEYS[3] the producer's latest broadcast
-- KEYS[4] parts   KEYS[5] stream of the part '*'   KEYS[6] stream of the routing key's part
-- ARGV[1] routing key   ARGV[2] envelope
-- ARGV[3] about how many messages a stream keeps
-- ARGV[4] milliseconds after which a stream that nothing is added to goes away
-- ARGV[5] name of this broadcast   ARGV[6] seconds for which it is remembered
-- ARGV[7] the routing key's part, or '' if everybody is to get it
-- Returns {number, binding...}: how many entries were added, 0 if nobody reads or if it is what the
-- producer broadcast last: the same, repeated because its reply was lost; then the bindings of
-- queues that keep a copy of their own, which the producer puts there: those that never go stale.
--
-- Each reader reads the exchange's own stream, which has all that is for everybody, and a part.
--
-- A server that is full takes broadcasts all the same, lest workers cannot greet each other, nor be
-- told anything; a stream keeps its last hundred then.

local time = redis.call('TIME')
local ms, us = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000), time[2] % 1000
local live = '(' .. string.format('%.0f', ms)
local result = {0}
local kept = redis.call('ZRANGEBYSCORE', KEYS[1], '+inf', '+inf')
for i = 1, #kept do result[i + 1] = kept[i] end
local readers = redis.call('ZCOUNT', KEYS[1], live, '(+inf')
if readers == 0 then return result end
if redis.call('GET', KEYS[3]) == ARGV[5] then
  redis.call('EXPIRE', KEYS[3], ARGV[6]) -- something written, so that WAIT waits for it
  return result
end

local function read_until(part) return tonumber(redis.call('HGET', KEYS[4], part) or 0) end

local streams = {KEYS[2]}
if ARGV[7] ~= '' then
  streams = {}
  if read_until('*') > ms then streams[1] = KEYS[5] end
  if read_until(ARGV[7]) > ms then streams[#streams + 1] = KEYS[6] end
  if #streams == 0 then return result end
end
-- To the microsecond, so that whoever reads several streams can tell their order. Redis makes an
-- id that goes on from the last one where the clock has stepped back.
local id = string.format('%.0f-%d', ms, us)
for i = 1, #streams do
  local key = streams[i]
  local function add(as, about, most) -- the field is the routing key: less to read
    return redis.pcall('XADD', key, 'MAXLEN', about, most, as, ARGV[1], ARGV[2])
  end
  local added = add(id, '~', ARGV[3])
  if type(added) == 'table' and added.err then added = add('*', '~', ARGV[3]) end
  if type(added) == 'table' and added.err and string.find(added.err, 'maxmemory', 1, true) then
    redis.call('PERSIST', key) -- a script's first write: what comes after it is not refused
    added = add('*', '=', math.min(100, tonumber(ARGV[3])))
  end
  if type(added) == 'table' and added.err then return added end
  redis.call('PEXPIRE', key, ARGV[4])
end
result[1] = #streams
redis.call('SET', KEYS[3], ARGV[5], 'EX', ARGV[6])
return result
