-- Tells which commands the user may not run. A script that was refused one midway would leave its
-- work half done: what was taken out of one place would not be in the other.
--
-- KEYS[1] a key that nobody uses, and that is not there afterwards
-- ARGV    commands, in lower case
-- Returns those that are refused.
local creates = {hincrby = {'x', '1'}, hset = {'x', 'x'}, sadd = {'x'}}
local harmless = {
    del = {}, exists = {}, expire = {'1'}, get = {}, hdel = {'x'}, hexists = {'x'}, hget = {'x'},
    hmget = {'x'}, hstrlen = {'x'}, persist = {}, pexpire = {'1'}, pttl = {}, set = {'x', 'XX'},
    sismember = {'x'}, smembers = {}, srem = {'x'}, unlink = {}, xadd = {'NOMKSTREAM', '*', 'x', 'x'},
    zadd = {'XX', '1', 'x'}, zcard = {}, zcount = {'1', '1'}, zrange = {'0', '0'},
    zrangebyscore = {'1', '1'}, zrem = {'x'}, zremrangebyscore = {'1', '1'}, zremrangebyrank = {'1', '0'},
    zrevrangebyscore = {'1', '1'}, zscore = {'x'},
}
local refused = {}

local function try(command, arguments)
    local reply = redis.pcall(command, KEYS[1], unpack(arguments))
    local said = type(reply) == 'table' and reply.err or ''
    if said:find('permission') or said:find("can't run") then
        refused[#refused + 1] = command
        return false
    end
    return true
end

local clears = try('del', {})
for _, command in ipairs(ARGV) do
    if command ~= 'del' and harmless[command] then
        try(command, harmless[command])
    elseif creates[command] and clears then
        try(command, creates[command])
        redis.call('DEL', KEYS[1])
    end
end
return refused
