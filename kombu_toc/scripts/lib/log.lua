-- Fragment: tells the recorder of the task library which messages to look at.
--
-- The stream `log` of a slot has an entry for each message that was put, moved or cancelled: a field
-- with what has happened, whose value is the id that the message is kept under. The recorder reads
-- messages as they are by then, writes their rows, and deletes the entries.
--
-- p: put, or put back   m: moved to another time   c: cancelled
-- full: what came next is not in the log, for it was full: all that waits is to be looked at

-- An id is counted as 64 bytes at least: so the log is bounded in bytes as well, at four times as many.
local function log_change(log, most, what, id)
  local length = redis.call('XLEN', log)
  if length < most and length * math.max(64, #id) < most * 64 then
    redis.call('XADD', log, '*', what, id)
  elseif length <= most then
    redis.call('XADD', log, '*', 'full', '')
  end
end
