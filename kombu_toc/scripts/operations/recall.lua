-- Gives once more what a pop gave whose reply was lost: as far as it is still in flight by that pop.
-- Its leases end a visibility timeout from now; no retry is spent.
--
-- KEYS, per slot of that pop: prepare, body, tokens
-- then what was given to the consumer last
-- ARGV[1] name of the pop
-- ARGV[2] visibility timeout in milliseconds; a message's own goes before it, unless ARGV[6] says
-- ARGV[3] retries of a message that has not been tried
-- ARGV[4] seconds for which the pop is to give nothing if it has not run yet; 0: it may
-- ARGV[5] 1: with the envelopes   ARGV[6] 1: the visibility timeout goes before the messages' own;
-- 2: and is longer than usual (lease.lua)
-- Returns {now in microseconds, {slot index, step index, id or {id, birth}, store score,
--          envelope, ...}}, as pop does
--@ clock admitted lease push

local given, name = KEYS[#KEYS], ARGV[1]
local now = clock()
local now_ms, visibility, own = math.floor(now / 1000), tonumber(ARGV[2]), ARGV[6] ~= '0'
local known, messages = redis.call('GET', given), {}
if known and string.sub(known, 1, #name + 1) == name .. '\n' then
  local gave = #known > #name + 1 and cmsgpack.unpack(string.sub(known, #name + 2)) or {{}, {}}
  local order, again, tokens_of = gave[1], gave[2], {}
  for i = 1, #again, 2 do tokens_of[again[i]] = again[i + 1] end
  for i = 1, #order, 4 do
    local slot, step, id, score = order[i], order[i + 1], order[i + 2], order[i + 3]
    local birth = tokens_of[i] or name
    local prepare, body, tokens = KEYS[3 * slot - 2], KEYS[3 * slot - 1], KEYS[3 * slot]
    local low = score % 1000
    local mark = 32 * (step - 1) + (low < 32 and low or tonumber(ARGV[3]))
    local lease, last = redis.call('ZSCORE', prepare, id), last_end(birth)
    if lease and tonumber(lease) % 1000 == mark and redis.call('HGET', tokens, id) == birth
        and not (last and last <= now_ms) then
      write_nothing(prepare)
      if ARGV[6] == '2' then note_longest(tokens, visibility) end
      redis.call('ZADD', prepare, lease_until(birth, now_ms, visibility, own) * 1000 + mark, id)
      local when = gave[3] and tonumber(gave[3][tostring(i)] or '') -- of a rate, see pop_limited.lua
      local named = birth == name and not when and id or {id, birth, when or 0}
      push(messages, slot - 1, step - 1, named, score, ARGV[5] == '1' and redis.call('HGET', body, id) or '')
    end
  end
elseif ARGV[4] ~= '0' then
  redis.call('DEL', given)
  redis.call('SET', given, name .. '\n', 'EX', ARGV[4])
end
return {now, messages}
