-- Fragment: where reading goes on in a sorted set, behind what was read last.

-- Whether `a` is before `b`, as Redis sorts members: by bytes (Lua would ask the locale).
local function before(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- The rank of the first member with this score that comes behind `id`, or is `id` if that `counts`; and that
-- of the first with this score.
local function rank_behind(key, score, id, counts)
  local first = redis.call('ZCOUNT', key, '-inf', '(' .. score)
  local from, to = first, first + redis.call('ZCOUNT', key, score, score)
  while from < to do
    local middle = math.floor((from + to) / 2)
    local member = redis.call('ZRANGE', key, middle, middle)[1]
    if before(member, id) or member == id and not counts then
      from = middle + 1
    else
      to = middle
    end
  end
  return from, first
end
