"""The text that wrappers are made of: Python with holes, filled in by ``source`` for an op's signature.

Read a wrapper that was made first: tests/wrappers/golden has some.
"""

# A call's arguments are a0, a1, ... up to the last that may be a tensor, and ``rest``; cast ones are
# b0, b1, ...

WRAPPER = """
def make({factory_parameters}):
    def wrapper({parameters}*rest, **kwargs):
        if {has_torch_function}:
            return override(wrapper, given({names}rest), kwargs)
        if _looks_closer:
            if is_off():
                return {plain_call}{narrows}
            if is_autocast_on():  # the lists win
                with DisableAutocast():
                    return wrapper(*given({names}rest), **kwargs)
{body}

    def settle():
        nonlocal legalizes
        legalizes = False

    def read():
        return {variables}

    def write(values):
        nonlocal {variables}
        {variables} = values

    return Made(wrapper, settle, Variables(VARIABLES, read, write))
"""

#: Where some casts may be off, and others on.
NARROWS = """
            if (others := narrowed()) is not None:
                return others(*given({names}rest), **kwargs)"""

#: A call whose dtypes torch's function refuses runs in fp32 instead. What else is raised passes: no frame
#: but the wrapper's is in its traceback, and none holds it.
TRY = """
        try:
{body}
        except Exception as error:
            again = retry(error, given({names}rest), kwargs)
            if again is None:
                raise
        return again()
"""

#: Any call.
CAST = """
        args = given({names}rest)
        if {is_overridden}:
            return override(wrapper, args, kwargs){keep}
        cast_args, kwargs = cast(args, kwargs)
        return {call}
"""

#: As `CAST`, where ``run`` casts.
RUN_LATE = """
        args = given({names}rest)
        if {is_overridden}:
            return override(wrapper, args, kwargs)
        return run(original, args, kwargs, args)
"""

#: As `CAST`, where ``run`` casts.
RUN = """
        if {legalizes}:
            args = given({names}rest)
            if is_overridden(args, kwargs):
                return override(wrapper, args, kwargs)
{fill}
            return run(original, args, kwargs, args)
"""

#: Optional tensors that are given by name, put into their places.
PLACED = """
            if kwargs and {last} is missing:
{fills}
                args = given({names}rest)
"""

#: A call that leaves out optional tensors, or gives them by name, is as good as one that gives all.
FILL = """
        if {last} is missing and {tests} and (not kwargs or are_plain(kwargs)):
{fills}
{settled}
"""

FILL_ONE = """            if a{position} is missing:
                a{position} = kwargs.pop("{name}", None)"""

#: Nothing is to be cast.
SETTLED = """
        try:
            settled = {test}
        except AttributeError:
            settled = False
        if settled and not kwargs:
            return {call}
"""

#: As that, where keywords hold no tensor but ``out``.
SETTLED_BESIDE_KEYWORDS = """
        if settled and "out" not in kwargs:
            return {call}
"""

#: torch computes in fp32 by itself, where one of several inputs is.
WIDENED = """
        try:
            widened = {test}
        except AttributeError:
            widened = False
        if widened:
            return {call}
"""

#: Plain tensors, all given by position, to one fixed dtype.
UNROLLED = """
        if {last} is not missing and {kwargs_are_plain}:
            if is_below_dispatcher():
                return original({names}*rest, **kwargs)
            is_usual = True{mixes}
{casts}
            if is_usual:
                return {call}
"""

UNROLLED_CAST = """
            b{position} = a{position}
            if type(b{position}) in plain_tensors:
                dtype_ = b{position}.dtype
                if dtype_ in other_dtypes:
                    if b{position}.layout is not strided:
                        is_usual = False
                    elif {is_to_be_cast}:
                        b{position} = convert(b{position}){or_number}
                elif dtype_ is not dtype and (dtype_.is_floating_point or dtype_.is_complex):
                    {leave_alone}
            elif b{position} is not None{and_no_number}:
                is_usual = False
"""

#: A 0-dim tensor on the CPU is cast with those beside it, wherever they are.
NUMBER = """
                    elif not b{position}.dim():
                        is_usual = False"""

#: Whether the first input is a tensor without a class of its own.
IS_PLAIN = "type(a0) in plain_tensors"

#: Whether a norm's parameters may stay fp32 beside such an input, as `casting` has it.
MIXES = "not a0.is_nested and transforms() is None"
