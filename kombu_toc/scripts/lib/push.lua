-- Fragment: a list grows.

local function push(list, ...) -- values, none of which is nil
  local n = #list
  for i, value in ipairs({...}) do list[n + i] = value end
end
