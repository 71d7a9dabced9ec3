-- Reads messages of a slot in the order of score, id and key, a bounded number at a time.
--
-- KEYS[1] body   KEYS[2] reasons   KEYS[3] tokens   KEYS[4...] the sorted sets to read
-- ARGV[1] how many at most   ARGV[2] lowest score   ARGV[3] highest score
-- ARGV[4] 1: with their envelopes, reasons and tokens
-- ARGV[5] bytes that the envelopes may have together; the first may have any
-- ARGV[6] '' to begin, or the score and ARGV[7] the id of what was read last
-- ARGV[8...] then, per sorted set: 1 if in that order it comes after the one it was read from; 2 more
--         if of this StoreQueue what waits in lanes is read (sorted.lua), by the score that it had
-- Returns {index of the sorted set, id, score, envelope, reason and last error, token, ...}; then 1
-- if there is more that has not been read for its bytes
--
-- O(log n) for each that is returned, however many wait and however many share a score.
--@ sorted ranks push

local count, low, high = tonumber(ARGV[1]), ARGV[2], ARGV[3]

local function first_rank(key, comes_after)
  local rank = low == '-inf' and 0 or redis.call('ZCOUNT', key, '-inf', '(' .. low)
  if ARGV[6] == '' then return rank end
  return math.max(rank, (rank_behind(key, ARGV[6], ARGV[7], comes_after)))
end

-- The same of what waits in lanes: there a lower score comes later, but of one score a lower id first.
local function lanes_page(key, comes_after)
  local page, begin = {}, math.max(tonumber(low == '-inf' and 0 or low), tonumber(ARGV[6]) or 0)
  local bound = string.format('%.0f', sorted_score(begin))
  while #page < 2 * count do
    local score = redis.call('ZREVRANGEBYSCORE', key, bound, '-inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
    if not score then break end
    local skip, plain = 0, plain_score(tonumber(score))
    if plain == tonumber(ARGV[6]) then
      local from, first = rank_behind(key, score, ARGV[7], comes_after)
      skip = from - first
    end
    local ids = redis.call('ZRANGEBYSCORE', key, score, score, 'LIMIT', skip, count - #page / 2)
    for i = 1, #ids do page[#page + 1], page[#page + 2] = ids[i], plain end
    bound = '(' .. score
  end
  return page
end

local pages, at = {}, {}
for number = 1, #KEYS - 3 do
  local key, flag = KEYS[3 + number], tonumber(ARGV[7 + number] or 0)
  if flag < 2 then
    local rank = first_rank(key, flag == 1)
    pages[number] = redis.call('ZRANGE', key, rank, rank + count - 1, 'WITHSCORES')
  else
    pages[number] = lanes_page(key, flag == 3)
  end
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
  local body = ARGV[4] == '1' and redis.call('HGET', KEYS[1], id) or ''
  push(found, best - 1, id, best_score, body, ARGV[4] == '1' and redis.call('HGET', KEYS[2], id) or '', '')
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
