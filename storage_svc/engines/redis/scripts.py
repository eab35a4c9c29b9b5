"""The scripts that run on the server: take a partition over, commit, and read.

Every script is bounded by its caller, because nothing else runs on the server meanwhile. Writing
scripts allow for a full memory: a script that failed half way would keep what it wrote. Publishes
are refused before, by the watermark.

A script that finds its work done writes a field again, with the value that it has: WAIT and WAITAOF
wait for the last write of their own connection, and return at once on one that wrote nothing.

All keys are declared (`layout.declared_keys`), the mark first; scripts name tables by themselves.
"""

from hashlib import sha1
from typing import Final, NamedTuple


class Script(NamedTuple):
    """A script, and the digest by which the server knows it."""

    text: bytes
    digest: bytes


def _script(flags: str, body: str) -> Script:
    text = f"#!lua flags={flags}\n{body}".encode()
    return Script(text, sha1(text, usedforsecurity=False).hexdigest().encode())


_AFTER: Final = """
-- The end, for a range of a sorted set, of what begins with a prefix.
local function after(prefix)
  local last = #prefix
  while last > 0 and string.byte(prefix, last) == 255 do
    last = last - 1
  end
  if last == 0 then
    return '+'
  end
  return '(' .. string.sub(prefix, 1, last - 1) .. string.char(string.byte(prefix, last) + 1)
end
"""

# KEYS[1] is the mark, ARGV[1] the table META, ARGV[2] the identity, ARGV[3] the epoch under which
# this node had the partition open (0: it had not), ARGV[4] the id of the opening. An opening whose
# answer was lost is repeated under its id, and is the same one then.
OPEN: Final = _script(
    "allow-oom",
    """
local mark = redis.call('HMGET', KEYS[1], 'epoch', 'sequence', 'commit_id', 'opening')
if mark[4] == ARGV[4] then
  redis.call('HSET', KEYS[1], 'opening', ARGV[4])
  return {'OPEN', mark[1], mark[2] or '0', mark[3] or ''}
end
local epoch = tonumber(mark[1] or '0')
if tonumber(ARGV[3]) > 0 and epoch > tonumber(ARGV[3]) then
  return {'FENCED', tostring(epoch)}
end
local identity = redis.call('HGET', ARGV[1], 'identity')
if not identity then
  if mark[1] or redis.call('EXISTS', ARGV[1]) == 1 then
    return {'CORRUPT'}
  end
elseif identity ~= ARGV[2] then
  return {'FOREIGN', identity}
end
epoch = math.max(epoch, tonumber(ARGV[3])) + 1
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', epoch), 'opening', ARGV[4])
if not identity then
  redis.call('HSET', ARGV[1], 'identity', ARGV[2])
end
return {'OPEN', string.format('%.0f', epoch), mark[2] or '0', mark[3] or ''}
""",
)

# KEYS[1] is the mark; ARGV[1] to ARGV[4] the mark that the commit follows, ARGV[5] and ARGV[6] its
# sequence and id, ARGV[7] what the names of tables begin with; then steps: what, kind, table,
# number of arguments, arguments.
COMMIT: Final = _script(
    "allow-oom",
    """
local mark = redis.call('HMGET', KEYS[1], 'epoch', 'opening', 'sequence', 'commit_id')
local before = {mark[1] or '0', mark[2] or '', mark[3] or '0', mark[4] or ''}
for i = 1, 4 do
  if before[i] ~= ARGV[i] then
    if before[3] == ARGV[5] and before[4] == ARGV[6] then
      redis.call('HSET', KEYS[1], 'sequence', ARGV[5])
    end
    return before
  end
end
local CHUNK = 1000
"""
    + _AFTER
    + """
local at = 8
while at <= #ARGV do
  local what, kind = ARGV[at], ARGV[at + 1]
  local key = ARGV[7] .. ARGV[at + 2]
  local first = at + 4
  local last = first + tonumber(ARGV[at + 3]) - 1
  if what == 'hset' or what == 'hdel' then
    local command = what == 'hset' and 'HSET' or 'HDEL'
    for from = first, last, CHUNK do
      redis.call(command, key, unpack(ARGV, from, math.min(last, from + CHUNK - 1)))
    end
  elseif what == 'zrem' then
    for from = first, last, CHUNK do
      redis.call('ZREM', key .. '<', unpack(ARGV, from, math.min(last, from + CHUNK - 1)))
    end
  elseif what == 'zadd' then
    local pairs_ = {}
    for i = first, last do
      pairs_[#pairs_ + 1] = 0
      pairs_[#pairs_ + 1] = ARGV[i]
      if #pairs_ == CHUNK or i == last then
        redis.call('ZADD', key .. '<', unpack(pairs_))
        pairs_ = {}
      end
    end
  elseif what == 'unpack' then
    for i = first, last do
      redis.call('ZREMRANGEBYLEX', key .. '<', '[' .. ARGV[i], after(ARGV[i]))
    end
  else
    local start, stop = '[' .. ARGV[first], '(' .. ARGV[last]
    if kind == 'o' then
      while true do
        local gone = redis.call('ZRANGEBYLEX', key .. '<', start, stop, 'LIMIT', 0, CHUNK)
        if #gone == 0 then
          break
        end
        redis.call('HDEL', key, unpack(gone))
        redis.call('ZREM', key .. '<', unpack(gone))
      end
    else
      redis.call('ZREMRANGEBYLEX', key .. '<', start, stop)
    end
  end
  at = last + 1
end
redis.call('HSET', KEYS[1], 'sequence', ARGV[5], 'commit_id', ARGV[6])
return false
""",
)

# KEYS[1] is the mark; ARGV[1] to ARGV[4] what it must be. Returns what it is.
VERIFY: Final = _script(
    "allow-oom",
    """
local mark = redis.call('HMGET', KEYS[1], 'epoch', 'opening', 'sequence', 'commit_id')
local before = {mark[1] or '0', mark[2] or '', mark[3] or '0', mark[4] or ''}
for i = 1, 4 do
  if before[i] ~= ARGV[i] then
    return before
  end
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
return before
""",
)

# KEYS[1] is the mark, ARGV[1] what the names of tables begin with, ARGV[2] the sequence that the
# server must have reached, or it is a former master; then requests. A load is 'load', kind, table,
# number of keys, keys; a scan is 'scan', kind, table, start, end ('' for none), rows, bytes. One
# string per request comes back, see `layout.py`.
READ: Final = _script(
    "no-writes",
    """
if tonumber(redis.call('HGET', KEYS[1], 'sequence') or '0') < tonumber(ARGV[2]) then
  return redis.error_reply('BEHIND the server lacks commits that were confirmed')
end
local answers = {}
local function starts_with(text, prefix)
  return string.sub(text, 1, #prefix) == prefix
end
"""
    + _AFTER
    + """
local function load(kind, key, first, last)
  local parts = {}
  local function add(value)
    if value then
      parts[#parts + 1] = struct.pack('>I4', #value + 1)
      parts[#parts + 1] = value
    else
      parts[#parts + 1] = struct.pack('>I4', 0)
    end
  end
  if kind == 'p' then
    for i = first, last do
      local wanted = ARGV[i]
      local row = redis.call(
        'ZRANGEBYLEX', key .. '<', '[' .. wanted, after(wanted), 'LIMIT', 0, 1)[1]
      if row and struct.unpack('>I2', row, #row - 1) == #wanted then
        add(string.sub(row, #wanted + 1, -3))
      else
        add(false)
      end
    end
  elseif last >= first then
    local values = redis.call('HMGET', key, unpack(ARGV, first, last))
    for i = 1, last - first + 1 do
      add(values[i])
    end
  end
  return table.concat(parts)
end
local function scan(kind, key, start, stop, rows, bytes)
  local parts = {}
  local found, size = 0, 0
  local from = '[' .. start
  local to = stop == '' and '+' or '(' .. stop
  while found < rows and size < bytes do
    local wanted = math.min(rows - found + 1, 100)
    local page = redis.call('ZRANGEBYLEX', key .. '<', from, to, 'LIMIT', 0, wanted)
    if #page == 0 then
      break
    end
    local values = kind == 'o' and redis.call('HMGET', key, unpack(page))
    for i, row in ipairs(page) do
      local name, value = row, nil
      if values then
        value = values[i]
      else
        local length = struct.unpack('>I2', row, #row - 1)
        name = string.sub(row, 1, length)
        value = string.sub(row, length + 1, -3)
      end
      -- A packed row before the start reaches beyond it where its key is the beginning of it.
      if not value then
        return redis.error_reply('CORRUPT a row of ' .. key .. ' has no value')
      elseif values or #name >= #start or not starts_with(start, name) then
        if found == rows or size >= bytes then
          return table.concat(parts)
        end
        parts[#parts + 1] = struct.pack('>I4I4', #name, #value)
        parts[#parts + 1] = name
        parts[#parts + 1] = value
        found = found + 1
        size = size + #name + #value
      end
    end
    if #page < wanted then
      break
    end
    from = '(' .. page[#page]
  end
  return table.concat(parts)
end
local at = 3
while at <= #ARGV do
  local kind, key = ARGV[at + 1], ARGV[1] .. ARGV[at + 2]
  local answer
  if ARGV[at] == 'load' then
    local first = at + 4
    local last = first + tonumber(ARGV[at + 3]) - 1
    answer = load(kind, key, first, last)
    at = last + 1
  else
    answer = scan(
      kind, key, ARGV[at + 3], ARGV[at + 4], tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6]))
    at = at + 7
  end
  if type(answer) == 'table' then
    return answer
  end
  answers[#answers + 1] = answer
end
return answers
""",
)
