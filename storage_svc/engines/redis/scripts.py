"""The scripts that run on the server: take a partition over, commit, and read.

Every script is bounded by its caller, because nothing else runs on the server meanwhile. A commit
that is too large for one script is staged first, piece by piece; one script seals it, which is the
moment at which it is committed; then its pieces are applied one by one.

A script that failed half way would keep what it wrote. Writing scripts therefore allow for a full
memory (publishes are refused before, by the watermark), and check before their first write that the
user may run every command which they may come to: rights can be withdrawn at any time.

A script that finds its work done writes a field again, with the value that it has: WAIT and WAITAOF
wait for the last write of their own connection, and return at once on one that wrote nothing.

All keys are declared (`layout.declared_keys`), the mark first; scripts name tables by themselves.
"""

from hashlib import sha1
from typing import Final, NamedTuple

PIECES_GONE: Final = 1
UNAPPLIED: Final = 2


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


def _allowed(*commands: str) -> str:
    """Fails if the user may not run one of these commands."""
    names = ", ".join(f"'{each}'" for each in commands)
    return f"""
for _, name in ipairs({{{names}}}) do
  if not redis.acl_check_cmd(name, KEYS[1]) then
    return redis.error_reply("NOPERM the user may not run the command '" .. name .. "'")
  end
end
"""


_WRITES: Final = ("hset", "hdel", "zadd", "zrem", "zcard", "zremrangebylex")
"""Commands of `_APPLY` for rows."""
_STAGES: Final = ("llen", "lindex", "lpop", "rpush", "unlink", "zrangebylex")
"""Further ones of commits that are staged, which may have ranges."""

# KEYS[1] is the mark; ARGV[1] to ARGV[4] the mark that a commit follows, ARGV[5] and ARGV[6] its
# sequence and id, ARGV[7] what the names of tables begin with. Returns the mark that is stored if
# it is another one, and UNAPPLIED if pieces of the commit before are left: a failover has lost that
# they were applied.
_FOLLOWS: Final = f"""
local mark = redis.call('HMGET', KEYS[1], 'epoch', 'opening', 'sequence', 'commit_id', 'staged')
local before = {{mark[1] or '0', mark[2] or '', mark[3] or '0', mark[4] or ''}}
for i = 1, 4 do
  if before[i] ~= ARGV[i] then
    if before[3] == ARGV[5] and before[4] == ARGV[6] then
      redis.call('HSET', KEYS[1], 'sequence', ARGV[5])
    end
    return before
  end
end
if mark[5] then
  return {UNAPPLIED}
end
"""

# Applies steps, each of them: what, kind, table, number of arguments, arguments. Returns whether a
# range has more rows than one script deletes.
#
# A table that is emptied is gone as a key. Where its slot is about to move to another server, key
# by key, this one then refuses whatever reaches for it, and the script would stop half way: so rows
# are added before others are removed, or an empty member keeps a sorted set until they are.
_APPLY: Final = (
    _AFTER
    + """
local CHUNK = 1000
local function remove(...)
  local removed = redis.pcall(...)
  if type(removed) == 'table' and removed.err
      and not string.find(removed.err, 'non local key', 1, true) then
    redis.call(...)  -- raises the error
  end
end
local function apply(base, steps, at)
  local count = #steps
  local is_kept = false
  while at <= count do
    local what, kind, key = steps[at], steps[at + 1], base .. steps[at + 2]
    local first = at + 4
    local last = first + tonumber(steps[at + 3]) - 1
    if what == 'hset' then
      for from = first, last, CHUNK do
        redis.call('HSET', key, unpack(steps, from, math.min(last, from + CHUNK - 1)))
      end
    elseif what == 'hdel' then
      for from = first, last, CHUNK do
        remove('HDEL', key, unpack(steps, from, math.min(last, from + CHUNK - 1)))
      end
    elseif what == 'zrem' then
      for from = first, last, CHUNK do
        remove('ZREM', key .. '<', unpack(steps, from, math.min(last, from + CHUNK - 1)))
      end
    elseif what == 'zadd' then
      local scored = {}
      for i = first, last do
        scored[#scored + 1] = 0
        scored[#scored + 1] = steps[i]
        if #scored == CHUNK or i == last then
          redis.call('ZADD', key .. '<', unpack(scored))
          scored = {}
        end
      end
      if is_kept then
        redis.call('ZREM', key .. '<', '')
        is_kept = false
      end
    elseif what == 'unpack' then
      if kind == 'k' and redis.call('ZCARD', key .. '<') <= last - first + 1 then
        redis.call('ZADD', key .. '<', 0, '')
        is_kept = true
      end
      for i = first, last do
        remove('ZREMRANGEBYLEX', key .. '<', '[' .. steps[i], after(steps[i]))
      end
    else
      local start, stop = '[' .. steps[first], '(' .. steps[last]
      local gone = redis.call('ZRANGEBYLEX', key .. '<', start, stop, 'LIMIT', 0, CHUNK)
      if #gone > 0 then
        if kind == 'o' then
          redis.call('HDEL', key, unpack(gone))
        end
        redis.call('ZREM', key .. '<', unpack(gone))
      end
      if #gone == CHUNK then
        return true
      end
    end
    at = last + 1
  end
  return false
end
"""
)

# KEYS[1] is the mark, ARGV[1] the table META, ARGV[2] the identity, ARGV[3] the epoch under which
# this node had the partition open (0: it had not), ARGV[4] the id of the opening, ARGV[5] the
# version of the layout, ARGV[6] the generation of this node (0 the first time), ARGV[7] its time;
# KEYS[3] has the pieces of a commit. An opening whose answer was lost is repeated under its id, and
# is the same one then.
OPEN: Final = _script(
    "allow-oom",
    _allowed("hget", "hmget", "exists", *_WRITES, *_STAGES)
    + """
local mark = redis.call(
  'HMGET', KEYS[1], 'epoch', 'sequence', 'commit_id', 'opening', 'layout', 'staged', 'generation')
local generation = mark[7] or '0'
if mark[1] and (mark[5] or '1') ~= ARGV[5] then
  return {'LAYOUT', mark[5] or '1'}
end
if mark[4] == ARGV[4] then
  redis.call('HSET', KEYS[1], 'opening', ARGV[4])
  return {'OPEN', mark[1], mark[2] or '0', mark[3] or '', generation}
end
local epoch = tonumber(mark[1] or '0')
if tonumber(ARGV[3]) > 0 and epoch > tonumber(ARGV[3])
    and tonumber(ARGV[6]) <= tonumber(generation) then
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
generation = ARGV[6]
if generation == '0' then
  generation = string.format('%.0f', math.max(tonumber(mark[7] or '0') + 1, tonumber(ARGV[7])))
end
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', epoch), 'opening', ARGV[4],
  'layout', ARGV[5], 'generation', generation)
if not identity then
  redis.call('HSET', ARGV[1], 'identity', ARGV[2])
end
if not mark[6] then  -- what another opening has staged, and not sealed
  redis.call('UNLINK', KEYS[3])
end
return {'OPEN', string.format('%.0f', epoch), mark[2] or '0', mark[3] or '', generation}
""",
)

# As `_FOLLOWS`; then steps.
COMMIT: Final = _script(
    "allow-oom",
    _FOLLOWS
    + _allowed(*_WRITES)
    + _APPLY
    + """
apply(ARGV[7], ARGV, 8)
redis.call('HSET', KEYS[1], 'sequence', ARGV[5], 'commit_id', ARGV[6])
return false
""",
)

# As `_FOLLOWS`; ARGV[8] is the number of pieces before this one, ARGV[9] the piece, and KEYS[2] has
# them. Returns PIECES_GONE if pieces before it are, as after a failover.
STAGE: Final = _script(
    "allow-oom",
    _FOLLOWS
    + _allowed(*_STAGES)
    + f"""
local pieces = tonumber(ARGV[8])
if pieces == 0 then
  redis.call('UNLINK', KEYS[2])
end
local found = redis.call('LLEN', KEYS[2])
if found < pieces then
  return {PIECES_GONE}
elseif found == pieces then  -- else it is there already, and its answer was lost
  redis.call('RPUSH', KEYS[2], ARGV[9])
end
return false
""",
)

# As `_FOLLOWS`; ARGV[8] is the number of pieces, and KEYS[2] has them. Returns PIECES_GONE if some
# are.
SEAL: Final = _script(
    "allow-oom",
    _FOLLOWS
    + f"""
if redis.call('LLEN', KEYS[2]) ~= tonumber(ARGV[8]) then
  return {PIECES_GONE}
end
redis.call('HSET', KEYS[1], 'sequence', ARGV[5], 'commit_id', ARGV[6], 'staged', ARGV[8])
return false
""",
)

# KEYS[1] is the mark, KEYS[2] has the pieces of a sealed commit; ARGV[1] and ARGV[2] are the epoch
# and the id of the opening, ARGV[3] what the names of tables begin with. Applies the first piece,
# or a part of it, and returns how many are left; the mark, if the partition is open elsewhere.
APPLY: Final = _script(
    "allow-oom",
    _allowed(*_WRITES, *_STAGES)
    + _APPLY
    + """
local mark = redis.call('HMGET', KEYS[1], 'epoch', 'opening', 'sequence', 'commit_id', 'staged')
if mark[1] ~= ARGV[1] or mark[2] ~= ARGV[2] then
  return {mark[1] or '0', mark[2] or '', mark[3] or '0', mark[4] or ''}
end
local left = tonumber(mark[5] or '0')
if left == 0 then
  return 0
end
local piece = redis.call('LINDEX', KEYS[2], 0)
if not piece then
  return redis.error_reply('CORRUPT a commit was sealed, and its pieces are gone')
end
if apply(ARGV[3], cmsgpack.unpack(piece), 1) then
  return left
end
redis.call('LPOP', KEYS[2])
left = left - 1
if left == 0 then
  redis.call('HDEL', KEYS[1], 'staged')
else
  redis.call('HSET', KEYS[1], 'staged', left)
end
return left
""",
)

# KEYS[1] is the mark, which it returns. It writes nothing, but is not declared so, and is therefore
# refused by a replica, which may lack the opening of another node.
MARK: Final = _script(
    "allow-oom",
    """
local mark = redis.call('HMGET', KEYS[1], 'epoch', 'opening', 'sequence', 'commit_id')
return {mark[1] or '0', mark[2] or '', mark[3] or '0', mark[4] or ''}
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

# KEYS[1] is the mark; ARGV[1] to ARGV[3] are the epoch, the opening and the last sequence of a node
# whose commits are lost, ARGV[4] its generation, ARGV[5] the table META, ARGV[6] the identity,
# ARGV[7] what the names of tables begin with; then steps. Returns 1, and writes nothing, if another
# node has opened the partition: under a lower epoch as well, where the store has lost that of this
# one. Else 0. The mark stays as it is: it shows the loss. If it has the commits again, as where the
# former master is back, nothing is written either. A server that was emptied gets the identity,
# without which its rows would be refused as corrupt.
STORE_AFTER_LOSS: Final = _script(
    "allow-oom",
    _allowed("hget", "hmget", "exists", *_WRITES)
    + _APPLY
    + """
local mark = redis.call('HMGET', KEYS[1], 'epoch', 'opening', 'sequence', 'generation')
if mark[2] == ARGV[2] then
  if tonumber(mark[3] or '0') >= tonumber(ARGV[3]) then
    return 0
  end
elseif tonumber(mark[1] or '0') >= tonumber(ARGV[1])
    or tonumber(mark[4] or '0') > tonumber(ARGV[4]) then
  return 1
end
if not mark[1] and redis.call('EXISTS', ARGV[5]) == 0 then
  redis.call('HSET', ARGV[5], 'identity', ARGV[6])
end
apply(ARGV[7], ARGV, 8)
return 0
""",
)

# KEYS[1] is the mark, ARGV[1] what the names of tables begin with, ARGV[2] the sequence that the
# server must have reached, or it is a former master, ARGV[3] the microseconds that the script may
# take, ARGV[4] whether no commit is under way, so that none may be half applied; then requests. A
# load is 'load', kind, table, its microseconds, number of keys, keys; a scan is 'scan', kind,
# table, start, end ('' for none), rows, bytes. The answers come back as one string, each with its
# length before it, see `layout.py`; there are fewer than requests, and at least one, where they
# would take longer.
READ: Final = _script(
    "no-writes",
    """
local mark = redis.call('HMGET', KEYS[1], 'sequence', 'staged')
if tonumber(mark[1] or '0') < tonumber(ARGV[2]) then
  return redis.error_reply('BEHIND the server lacks commits that were confirmed')
elseif mark[2] and ARGV[4] == '1' then
  return redis.error_reply('UNAPPLIED the server has lost that a commit was applied')
end
local answers = {}
local BYTE_US = 0.004  -- large values are copied several times
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
          return table.concat(parts), found
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
  return table.concat(parts), found
end
local at, spent, allowed = 5, 0, tonumber(ARGV[3])
while at <= #ARGV and spent < allowed do
  local kind, key = ARGV[at + 1], ARGV[1] .. ARGV[at + 2]
  local answer
  if ARGV[at] == 'load' then
    local cost = tonumber(ARGV[at + 3])
    if spent > 0 and spent + cost > allowed then
      break
    end
    local first = at + 5
    local last = first + tonumber(ARGV[at + 4]) - 1
    answer = load(kind, key, first, last)
    spent = spent + math.max(cost, #answer * BYTE_US)
    at = last + 1
  else
    local rows
    answer, rows = scan(
      kind, key, ARGV[at + 3], ARGV[at + 4], tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6]))
    if type(answer) == 'table' then
      return answer
    end
    spent = spent + 5 + math.max(3 * rows, #answer * BYTE_US)
    at = at + 7
  end
  answers[#answers + 1] = struct.pack('>I4', #answer)
  answers[#answers + 1] = answer
end
return table.concat(answers)
""",
)
