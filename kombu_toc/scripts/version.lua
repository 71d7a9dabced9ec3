-- Fragment: the version of an exchange's bindings. Who has read them asks for it, to learn whether
-- they are still the same: 'STAMP:COUNT'. The first release binds and unbinds without a new one;
-- then there are others than COUNT.

local function new_version(key, count) -- never the same again: by the clock, but always later
  local time = redis.call('TIME')
  local last = string.match(redis.call('GET', key) or '', '^%d+') or 0
  local stamp = math.max(tonumber(time[1]) * 1000000 + tonumber(time[2]), tonumber(last) + 1)
  local version = string.format('%.0f:%d', stamp, count)
  redis.call('SET', key, version)
  return version
end
