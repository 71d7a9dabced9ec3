-- Fragment: the version of an exchange's bindings. Who has read them asks for it, to learn whether
-- they are still the same.

local function new_version(key) -- never the same again: by the clock, but always later
  local time = redis.call('TIME')
  local stamp = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local version = string.format('%.0f', math.max(stamp, tonumber(redis.call('GET', key) or 0) + 1))
  redis.call('SET', key, version)
  return version
end
