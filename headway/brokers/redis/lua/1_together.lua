-- Several functions in one call. A process batches them if their keys are on one node, or in one slot of a cluster.
local together = {parts = {}}

-- Register a function that can be called on its own or as part of `together`.
function together.register(name, callback, flags)
  together.parts[name] = callback
  redis.register_function{function_name = VERSION .. '_' .. name, flags = flags or {'allow-oom'}, callback = callback}
end

-- Register a step of a queue. `take` is called with the state and the arguments. It returns the answer (by default `instants`), and true if
-- it changed no figures.
local function step(name, take)
  together.register(name, function(keys, args)
    local s = open(keys, args)
    local answer, unchanged = take(s, args)
    if unchanged then
      leave(s)
    else
      save(s)
    end
    return answer or instants(s)
  end)
end

-- together: run several functions. If one fails, the others still run. Arguments for each: name, key, number of arguments, arguments.
-- Returns for each 1 and its answer, or 0 and its error message.
redis.register_function{function_name = VERSION .. '_together', flags = {'allow-oom'}, callback = function(_, args)
  local answers, at = {}, 1
  while args[at] do
    local last = at + 2 + tonumber(args[at + 2])
    local done, answer = pcall(together.parts[args[at]], {args[at + 1]}, {unpack(args, at + 3, last)})
    if done then
      answers[#answers + 1] = {1, answer}
    else
      answers[#answers + 1] = {0, type(answer) == 'table' and answer.err or tostring(answer)}
    end
    at = last + 1
  end
  return answers
end}
