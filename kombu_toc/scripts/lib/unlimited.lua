-- Fragment: the slot is of a topic that is not limited. What differs otherwise is in limited.lua.

local limited = nil
