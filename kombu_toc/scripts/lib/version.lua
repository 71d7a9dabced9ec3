-- Fragment: the version of an exchange's bindings. Who has read them asks for it, to learn whether
-- they are still the same. Needs clock.lua.

local function new_version(key) -- never the same again: by the clock, but always later
  local version = string.format('%.0f', math.max(clock(), tonumber(redis.call('GET', key) or 0) + 1))
  redis.call('SET', key, version)
  return version
end
