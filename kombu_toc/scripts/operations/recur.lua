-- Changes what is known of one schedule, and the message that waits for its next firing, together:
-- only if nobody has changed it since who calls this has read it (recurring.lua).
--
-- KEYS[1] armed   KEYS[2] body   KEYS[3] tokens   KEYS[4] reasons   KEYS[5] schedules
-- KEYS[6] templates   KEYS[7] firings   KEYS[8] coming   KEYS[9] names of schedules
-- KEYS[10] when one was changed last   KEYS[11...] store (one per priority step)
-- then the wake index, if it is on this node
-- ARGV[1] number of priority steps   ARGV[2] slot number   ARGV[3] name of the schedule
-- ARGV[4] its record as it was read, or '' if there was none   ARGV[5] the new one, or '' for none:
-- then all of it goes
-- ARGV[6] its template, or '' for the one it has
-- ARGV[7] when it fires next, in microseconds since the epoch, or '+inf'
-- ARGV[8] id of a message that is taken out if it still waits, or ''
-- ARGV[9] id of a message that is put unless there is one of that id, or ''
-- ARGV[10] its envelope   ARGV[11] its action time in microseconds   ARGV[12] index of its step
-- ARGV[13] its traits as token.lua has them, or ''
-- ARGV[14] lines of what has fired, each ending with a newline. One that begins with the same id
-- as a line that is there replaces it; the others go before them   ARGV[15] how many are kept
-- ARGV[16] 1: a server that is full accepts it   ARGV[17] 1: what the slot announces is announced for
-- the whole queue, which may hold something although the slot does not
-- ARGV[18...] further messages, each its id, envelope and action time; each is put unless there is one
-- of that id
-- Returns {1 done | 0 the record is another one, which then follows, or '', now in microseconds,
--          how many messages were put, 1 if one was taken out, announcements, settled}
--@ clock admitted wake spread token sorted

local steps, name, wanted = tonumber(ARGV[1]), ARGV[3], ARGV[5]
local wake = KEYS[11 + steps]
local now = clock()

local standing = redis.call('HGET', KEYS[5], name) or ''
if standing ~= ARGV[4] then return {0, standing, now, 0, 0, said, unsaid} end

-- Redis refuses what takes memory when it is full, but not after a script's first write: this one,
-- of nothing. The firing that is taken makes room for the one that follows.
if ARGV[16] == '1' or wanted == '' then write_nothing(KEYS[8]) end

local stores = {unpack(KEYS, 11, 10 + steps)}
local function take_out(id)
  local step = waits_at(stores, id)
  if not step then return 0 end
  redis.call('ZREM', stores[step], id)
  forget(KEYS[2], KEYS[4], KEYS[3], id)
  return 1
end

local function put(id, body, at)
  if redis.call('HEXISTS', KEYS[2], id) == 1 then return 0 end
  local store = KEYS[11 + tonumber(ARGV[12])]
  local us, score = now, due_score(now)
  if at > now then us, score = at, action_score(at) end
  score = free_score(store, score)
  redis.call('HSET', KEYS[2], id, body)
  if ARGV[13] == '' then
    redis.call('HDEL', KEYS[3], id)
  else
    redis.call('HSET', KEYS[3], id, ARGV[13])
  end
  redis.call('ZADD', store, score, id)
  announce_if_first(wake, KEYS[1], ARGV[2], math.max(us, action_time(score)), now)
  return 1
end

-- The lines that stay, behind the new ones.
local function fired(lines, known, most)
  local new = {}
  for line in string.gmatch(lines, '[^\n]*\n') do
    new[string.match(line, '^[^\t\n]*')] = line
  end
  local kept = {}
  for line in string.gmatch(known, '[^\n]*\n') do
    local id = string.match(line, '^[^\t\n]*')
    if new[id] then
      kept[#kept + 1] = new[id]
      new[id] = nil
    else
      kept[#kept + 1] = line
    end
  end
  local all = {}
  for line in string.gmatch(lines, '[^\n]*\n') do
    if new[string.match(line, '^[^\t\n]*')] then table.insert(all, 1, line) end
  end
  -- Behind the latest, those whose messages are there: one may still run.
  local beyond = 0
  for i = 1, #kept do
    local id = string.match(kept[i], '^[^\t\n]*')
    if #all - beyond < most then
      all[#all + 1] = kept[i]
    elseif beyond < most and redis.call('HEXISTS', KEYS[2], id) == 1 then
      all[#all + 1] = kept[i]
      beyond = beyond + 1
    end
  end
  return table.concat(all)
end

local added, removed = 0, 0
if wanted ~= '' then
  redis.call('HSET', KEYS[5], name, wanted)
  redis.call('ZADD', KEYS[8], ARGV[7], name)
  redis.call('ZADD', KEYS[9], 0, name)
  redis.call('ZADD', KEYS[10], 'GT', now, '')
  if ARGV[6] ~= '' then redis.call('HSET', KEYS[6], name, ARGV[6]) end
  if ARGV[14] ~= '' then
    local known = redis.call('HGET', KEYS[7], name) or ''
    redis.call('HSET', KEYS[7], name, fired(ARGV[14], known, tonumber(ARGV[15])))
  end
else
  redis.call('HDEL', KEYS[5], name)
  redis.call('ZREM', KEYS[8], name)
  redis.call('ZREM', KEYS[9], name)
  redis.call('HDEL', KEYS[6], name)
  redis.call('HDEL', KEYS[7], name)
  if redis.call('EXISTS', KEYS[8]) == 0 then redis.call('DEL', KEYS[10]) end
end
if ARGV[8] ~= '' then removed = take_out(ARGV[8]) end
if ARGV[9] ~= '' then added = put(ARGV[9], ARGV[10], tonumber(ARGV[11])) end
for i = 18, #ARGV, 3 do added = added + put(ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])) end
if removed == 1 and added == 0 and ARGV[17] ~= '1' then settle_if_empty(wake, KEYS[1], ARGV[2], stores) end
return {1, '', now, added, removed, said, unsaid}
