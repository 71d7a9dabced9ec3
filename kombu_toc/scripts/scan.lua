-- Reads messages of a slot in the order of score, id and key, a bounded number at a time.
--
-- KEYS[1] body   KEYS[2] reasons   KEYS[3] tokens   KEYS[4...] the sorted sets to read
-- ARGV[1] how many at most   ARGV[2] lowest score   ARGV[3] highest score
-- ARGV[4] 1: with their envelopes, reasons and tokens
-- ARGV[5] bytes that the envelopes may have together; the first may have any
-- ARGV[6] '' to begin, or the score and ARGV[7] the id of what was read last
-- ARGV[8...] then, per sorted set: 1 if in that order it comes after the one it was read from
-- Returns {index of the sorted set, id, score, envelope, reason and last error, token, ...}; then 1
-- if there is more that has not been read for its bytes
--
-- O(log n) for each that is returned, however many wait and however many share a score.

local count, low, high = tonumber(ARGV[1]), ARGV[2], ARGV[3]

-- Whether `a` is before `b`, as Redis sorts members: by bytes (Lua would ask the locale).
local function before(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

local function first_rank(key, comes_after)
  local rank = low == '-inf' and 0 or redis.call('ZCOUNT', key, '-inf', '(' .. low)
  if ARGV[6] == '' then return rank end
  local from = redis.call('ZCOUNT', key, '-inf', '(' .. ARGV[6])
  local to = from + redis.call('ZCOUNT', key, ARGV[6], ARGV[6])
  while from < to do
    local middle = math.floor((from + to) / 2)
    local id = redis.call('ZRANGE', key, middle, middle)[1]
    if before(id, ARGV[7]) or id == ARGV[7] and not comes_after then
      from = middle + 1
    else
      to = middle
    end
  end
  return math.max(rank, from)
end

local pages, at = {}, {}
for number = 1, #KEYS - 3 do
  local key = KEYS[3 + number]
  local rank = first_rank(key, ARGV[7 + number] == '1')
  pages[number] = redis.call('ZRANGE', key, rank, rank + count - 1, 'WITHSCORES')
  at[number] = 1
end

local found, budget = {}, tonumber(ARGV[5])
local most = high == '+inf' and math.huge or tonumber(high)
for _ = 1, count do
  local best, best_score
  for number = 1, #pages do
    local id, score = pages[number][at[number]], tonumber(pages[number][at[number] + 1])
    if id and score <= most and (not best or score < best_score
        or score == best_score and before(id, pages[best][at[best]])) then
      best, best_score = number, score
    end
  end
  if not best then break end
  local id = pages[best][at[best]]
  at[best] = at[best] + 2
  local n = #found
  if ARGV[4] == '1' then
    budget = budget - redis.call('HSTRLEN', KEYS[1], id)
    if budget < 0 and n > 0 then
      found[n + 1] = 1
      break
    end
  end
  found[n + 1] = best - 1
  found[n + 2] = id
  found[n + 3] = best_score
  found[n + 4] = ARGV[4] == '1' and redis.call('HGET', KEYS[1], id) or ''
  found[n + 5] = ARGV[4] == '1' and redis.call('HGET', KEYS[2], id) or ''
  found[n + 6] = ''
end
if ARGV[4] == '1' then
  for from = 1, #found - 5, 6000 do
    local ids, to = {}, math.min(from + 5999, #found - 5)
    for i = from, to, 6 do ids[#ids + 1] = found[i + 1] end
    local tokens = redis.call('HMGET', KEYS[3], unpack(ids))
    for n = 1, #ids do found[from + 6 * n - 1] = tokens[n] or '' end
  end
end
return found
