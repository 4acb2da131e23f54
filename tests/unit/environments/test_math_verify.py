r"""The reward `math` agrees with math-verify's default verdict, except in the listed cases."""

import pytest
from math_verify import parse, verify

from bridge_environments import rewards

RIGHT = r"""
42 | 42
42 | 42.0
42 | 042
42 | +42
42 | (42)
42 | 42\,
42 | 42\;
x+1 | x+1\,
(-1,234) | (-1, 234)
-3 | -3
-3 | −3
-\frac{1}{2} | \frac{-1}{2}
-\frac{1}{2} | -0.5
\frac{1}{2} | 1/2
\frac{1}{2} | 0.5
\frac{1}{2} | .5
\frac{1}{2} | \dfrac12
\frac{1}{2} | \tfrac{2}{4}
\frac{1}{3} | 0.333333
\frac{1}{3} | 0.3333333333
2\frac{1}{2} | 2.5
\frac{5}{2} | 2\frac{1}{2}
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt 2}
\frac{\sqrt{2}}{2} | 0.70710678
\sqrt{8} | 2\sqrt{2}
\sqrt[3]{27} | 3
2\pi | 6.283185307
\pi | 3.14159265
\frac{\pi}{4} | \arctan(1)
e^2 | e^{2}
\ln 2 | \log_{e} 2
\log_{2} 8 | 3
2^{10} | 1024
5! | 120
\binom{5}{2} | 10
1,234 | 1234
1{,}234 | 1234
1,000,000 | 1{,}000{,}000
1234.5 | 1,234.5
50\% | 50
50\% | 0.5
0.5 | 50\%
50\% | \frac{1}{2}
50 | 50\text{ percent}
12.5\% | \frac{1}{8}
5\text{ km} | 5
5 | 5\text{ km}
5 | 5\,\mathrm{kg}
5 | 5\ \text{m}^2
5 | 5 \text{ m/s}
5\text{ km/h} | 5
10\,\mathrm{m/s^2} | 10
\frac{1}{2} | \frac{1}{2}\text{ cup}
\frac{1}{2}\text{ cup} | 1/2
12.50\text{ dollars} | \$12.50
\$12.50 | 12.5
90^\circ | 90
90 | 90^{\circ}
37 | 37^\circ\text{C}
5\times 10^{3}\,\mathrm{J} | 5000
5 \times 10^{3} | 5000
5000 | 5 \cdot 10^3
1.6 \times 10^{-19} | 1.6 \times 10^{-19}
1.6 \times 10^{-19} | 16 \times 10^{-20}
6.02 \times 10^{23} | 6.02 \cdot 10^{23}
0.00025 | 2.5 \times 10^{-4}
0.00025 | \frac{1}{4000}
0.001 | 10^{-3}
x+1 | 1+x
(x+1)^2 | x^2+2x+1
x^2-1 | (x-1)(x+1)
\frac{x}{y} | x/y
2x | x \cdot 2
x=5 | 5
5 | x=5
x = 5 | x=5
y=2x+1 | y = 1 + 2x
y=2x+1 | 2x - y + 1 = 0
x > 3 | 3 < x
1 < x < 2 | 1 < x < 2
1 < x < 2 | (1,2)
x \le 3 | x \leq 3
(1,2) | (1, 2)
(1,2) | \left(1,2\right)
[1,2) | \left[1,2\right)
(-\infty, 3] | (-\infty,3]
(0,1) \cup (2,3) | (0,1)\cup(2,3)
(3,-4,5) | (3, -4, 5)
\left(\frac{1}{2}, 3\right) | (0.5, 3)
\{1,2,3\} | \{3,2,1\}
\{1,2\} | 1, 2
1,2 | 2,1
1,2 | 1 \text{ and } 2
1,2 | 1\text{ or }2
\{\frac{1}{2}\} | \{0.5\}
\emptyset | \emptyset
\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\begin{pmatrix}\frac12 & 0\end{pmatrix} | \begin{pmatrix}0.5 & 0\end{pmatrix}
3+4i | 4i+3
i | i
\text{Lima} | \text{Lima}
\text{Lima} | \text{lima}
\text{Lima} | Lima
\text{(B)} | \text{(B)}
B | B
B | \text{B}
\text{B} | B
\text{even} | \text{even}
3:2 | 3:2
\frac{3}{2} | 3/2
\infty | \infty
-\infty | -\infty
\sin(x) | \sin x
\cos^2 x + \sin^2 x | 1
n(n+1)/2 | \frac{n(n+1)}{2}
a_1 | a_1
|x| | |x|
0 | 0
0 | 0.0
0 | -0
10000 | 10^4
0.1 | 0.10
10 | 1\cdot10
"""
"""Right answer | what a completion puts into its box."""
WRONG = r"""
42 | 43
42 | -42
42 | 4.2
42 | 42.1
42 | 24
42 | 420
42 | 4, 2
42 | 42x
42 | 42i
42 | 42!
42 | 42^2
42 | \frac{1}{42}
42 | 41 < x < 42
42 | \{41, 42\}
42 | 42, 43
42 | [42, 43]
42 | \text{forty-two}
42 | x
-3 | 3
\frac{1}{2} | 0.51
\frac{1}{2} | 2
\frac{1}{2} | \frac{1}{3}
\frac{1}{3} | 0.33
\frac{1}{3} | 0.3333
\frac{\sqrt{2}}{2} | 0.7071
2\pi | 6.28
2\pi | \pi
2\frac{1}{2} | \frac{2}{1}
1,234 | 1,235
1,234 | 1.234
1234 | 1,2
1234 | 12 34
50\% | 5\%
50\% | 500
5\text{ km} | 6\text{ km}
5\text{ km} | 5.5
12.50\text{ dollars} | \$12.05
90^\circ | 45^\circ
5 \times 10^{3} | 5 \times 10^{2}
6.02 \times 10^{23} | 6.03 \times 10^{23}
0.01 | 0.02
0.001 | 0.002
x+1 | x-1
x+1 | y+1
(x+1)^2 | x^2+1
x=5 | x=6
x=5 | y=5
x=5 | 6
y=2x+1 | y=2x-1
x > 3 | x < 3
x > 3 | x \ge 3
1 < x < 2 | 1 < x < 3
(1,2) | (2,1)
(1,2) | [1,2]
[1,2) | (1,2]
(3,-4,5) | (3,4,5)
(3,-4,5) | (5,-4,3)
\{1,2,3\} | \{1,2\}
\{1,2\} | \{1,3\}
1,2 | 1
1,2 | 2
1,2 | 1,2,3
6 | 2, 4, 6
7 | 5 < x < 7
10 | 10!
10 | 10i
\emptyset | 0
\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix} | \begin{pmatrix}1 & 3\\2 & 4\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1 & 2\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | 1
3+4i | 3-4i
3+4i | 7
\text{Lima} | \text{Quito}
\text{Lima} | 5
B | A
\text{(B)} | \text{(A)}
3:2 | 2:3
\infty | -\infty
\infty | 1000000
\sin(x) | \cos(x)
n(n+1)/2 | n^2
0 | 1
0 | 0.1
0 | \emptyset
10^{10} | 10^{11}
2^{100} | 2^{101}
(10^{-7}, 2 \cdot 10^{-7}) | (3 \cdot 10^{-7}, 5 \cdot 10^{-7})
x = 0.0000001 | x = 0.0000002
0.00000001x | 0.00000002x
\begin{pmatrix}10^{-8}\\1\end{pmatrix} | \begin{pmatrix}10^{-9}\\1\end{pmatrix}
"""
EXCEPTIONS: dict[str, tuple[bool, str]] = {
    "small numbers have six significant digits": (
        False,
        r"""
1.6 \times 10^{-19} | 9 \times 10^{-19}
1.6 \times 10^{-19} | -3 \times 10^{-20}
1.6 \times 10^{-19} | 0.0
0.0000001 | 0.0000004
\frac{1}{2^{99}} | \frac{1}{2^{98}}
\frac{1}{7000} | 0.000143
(0.0000001, 1) | (0.0000003, 1)
\{0.0000001, 1\} | \{0.0000003, 1\}
10^{-500} | 10^{-501}
""",
    ),
    "scientific notation is a number": (
        True,
        r"""
1500 | 1.5e3
0.00001 | 1e-05
0.005 | 5e-3
1.6 \times 10^{-19} | 1.6e-19
2e5 | 200000
""",
    ),
    "words behind a number are its unit": (
        True,
        r"""
42 | 42 eggs
42 | 42 apples a day
42 | \text{42 apples}
2.5 | \text{2.5 hours}
42 eggs | 42
""",
    ),
    "a space may separate thousands": (
        True,
        r"""
1234 | 1\,234
1000000 | 1\,000\,000
1234 | 1 234
""",
    ),
    "a mixed number may be plain": (
        True,
        r"""
5/4 | 1 1/4
\frac{5}{4} | 1 1/4
1.25 | 1\,1/4
-5/4 | -1 1/4
1 1/4 | 5/4
1 1/4 | 1\frac{1}{4}
2469/2 | 1,234 1/2
5/4 | 1 1/4 \text{ cups}
3/2 | 1½
1/2 | ½
(1/2, 3/2) | (1/2, 1 1/2)
9/2 | 3 1/2 + 1
""",
    ),
    "a mixed number is no fraction of a sum": (False, "\n1/2 | 1 1/4\n3/4 | 2 1/4\n15/8 | 10 5/8\n"),
    "the end of a sentence may be inside": (True, "\n42 | 42.\n42 | 42,\n"),
    "spaces of LaTeX at the end are none of the answer": (True, "\n42 | 42~\n42 | 42 \\\\\nx+1 | x+1\\ \\\\\n"),
    "a relation in front is none of the answer": (True, "\n1/2 | = 1/2\n1/2 | \\approx 1/2\nx+1 | = x+1\n"),
    "commas are thousands separators beside other things": (
        True,
        "\n1234 | x = 1,234\n1234 | 1,234^\\circ\n\\{1234, 5\\} | \\{1234,5\\} \\\\\n",
    ),
    "a percentage of either sign is its number": (True, "\n-5 | -5\\%\n3.5 | 3.5\\%\n1234 | 1,234%\n"),
}
"""What is decided otherwise than by math-verify -> how, and where."""


def pairs(table: str) -> list[tuple[str, str]]:
    rows = [line.split(" | ", 1) for line in table.strip("\n").splitlines()]
    return [(answer, given) for answer, given in rows]


def verdicts(answer: str, given: str) -> tuple[bool, bool]:
    """Return math-verify's own verdict, and the reward's."""
    completion = rf"So it is \boxed{{{given}}}."
    theirs = verify(parse(f"${answer}$"), parse(completion))
    return theirs, rewards.is_right(answer, completion)


@pytest.mark.parametrize(("answer", "given"), pairs(RIGHT))
def test_right_answer_is_right_as_in_math_verify(answer: str, given: str) -> None:
    assert verdicts(answer, given) == (True, True)


@pytest.mark.parametrize(("answer", "given"), pairs(WRONG))
def test_wrong_answer_is_wrong_as_in_math_verify(answer: str, given: str) -> None:
    assert verdicts(answer, given) == (False, False)


@pytest.mark.parametrize("reason", EXCEPTIONS)
def test_listed_exception_differs_from_math_verify(reason: str) -> None:
    expected, table = EXCEPTIONS[reason]
    assert [verdicts(*pair) for pair in pairs(table)] == [(not expected, expected)] * len(pairs(table))


@pytest.mark.parametrize(
    ("answer", "line", "expected"),
    [
        ("10", "10!", False),
        ("6", "2, 4, 6", False),
        ("7", "5 < x < 7", False),
        ("13", "12 or 13", False),
        ("234", "1 234", False),
        ("23", "2*3", False),
        ("2", r"the answer is \sqrt{2}", False),
        ("6", "2*3", True),
        ("8", "2**3", True),
        ("4", "**4** eggs", True),
        ("36", "18 eggs * $2 = $36", True),
        ("1500", "1.5e3", True),
        ("42", "the answer is 42", True),
        ("42", "42.", True),
        ("-3", "−3", True),
        (1e-07, "1e-7", True),
        ("3e - 1", "-1+3e", True),
        ("3e - 1", "3e-1", True),
        (r"\ln 2", r"\ln 2", True),
        (r"2\pi", r"2\pi", True),
        ("-1/2", "-1/2 percent", True),
        ("xy", "xy", True),
        ("x = 1 or x = 2", "x = 1 or x = 2", True),
    ],
)
def test_answer_line_is_a_formula_or_contains_a_number(answer: object, line: str, expected: bool) -> None:
    assert rewards.is_right(answer, f"#### {line}") == expected


@pytest.mark.parametrize("number", ["72", "-72", "1,234", "-1,234", "-3.5"])
@pytest.mark.parametrize(
    "line",
    [
        "{}, or so", "{} or so", "{}, I am sure of it", "{}, so it is", "{} km/h", "{} m^2", "{} m/s", "{} (in kg)",
        "So, {}", "is {}", "= {}", r"\approx {}", r"$\approx$ {}", "x = {}", "$x = {}$", r"{}\,", r"{}\;", r"{}\ ",
        r"{}\quad", "{}~", r"{} \\", "{}%", r"{}\%",
    ],
)  # fmt: skip
def test_decoration_around_a_number_is_ignored(number: str, line: str) -> None:
    given = f"#### {line.format(number)}"
    assert rewards.is_right(number, given)
    assert not rewards.is_right(number.lstrip("-") if number.startswith("-") else f"-{number}", given)
    assert not rewards.is_right("7", given)


NUMBERS = (("72", "-72"), ("-1,234", "1,234"), ("1/2", "-1/2"))
"""Numbers in a completion, each with its opposite."""
FORMS = ("#### {}", r"\boxed{{{}}}", "The answer is {}")
GRID = r"""
{} | 101010 101010 101010
${}$ | 101010 101010 101010
\({}\) | 101010 100010 101010 | 101010 101010 101010
**{}** | 101000 000000 101000 | 101010 101010 101010
({}) | 000010 100010 000010 | 100010 100010 000010
[{}] | 000000 100010 000000 | 100010 100010 000000
$\mathbf{{{}}}$ | 100010 100010 100010 | 101010 101010 100010
\text{{{}}} | 000000 100010 000000 | 101010 101010 000000
={} | 101010 101000 101010 | 101010 101010 101010
= {} | 101010 101000 101010 | 101010 101010 101010
x = {} | 101010 100010 101010 | 101010 101010 101010
x={} | 101010 100010 101010 | 101010 101010 101010
$x = {}$ | 100010 100010 100010 | 101010 101010 101010
is {} | 101010 000000 101010
So, {} | 101010 000000 101010
about {} | 101010 000000 101010
approximately {} | 101010 000000 101010
$\approx$ {} | 101010 101000 101010 | 101010 101010 101010
\approx {} | 101010 101000 101010 | 101010 101010 101010
≈ {} | 101010 101000 101010 | 101010 101010 101010
~{} | 000000 000000 000000 | 101010 101010 000000
Answer: {} | 101010 000000 101010
The answer is {} | 101010 000000 101010
\text{{Total: }}{} | 000000 000000 000000
a {} | 101010 000000 101010 | 000000 000000 101010
\${} | 000000 101010 000000 | 101010 101010 101010
€{} | 101000 000000 101000
£{} | 101000 000000 101000
{}. | 101010 000000 101010 | 101010 101010 101010
{}, | 101010 000000 101010 | 101010 101010 101010
{}; | 101000 000000 101000 | 101010 101010 101000
{}: | 101010 000000 101010
{}! | 101000 000010 101000 | 000010 000010 101000
{}? | 101000 000000 101000
{}... | 101000 000000 101000 | 101010 101010 101000
{}% | 101000 100000 101000 | 101000 101000 101000
{}\% | 101000 100000 101000 | 101000 101000 101000
{} % | 101010 100000 101010 | 101000 101000 101010
{}, or so | 101010 000000 101010
{} or so | 101010 000000 101010
{}, in total | 101010 000000 101010
{} in all | 101010 000000 101010
{}, I am sure of it | 101010 000000 101010
{}, so it is | 101010 000000 101010
{}, is it | 101010 000000 101010
{} kg | 101010 101010 101010
{} km/h | 101010 000000 101010
{} m | 101010 101010 101010
{} m^2 | 101010 000000 101010
{} dollars | 101010 000000 101010 | 101010 101010 101010
{} USD | 101010 000000 101010 | 101010 101010 101010
{} € | 101010 000000 101010
{} apples | 101010 101010 101010
{} a day | 101010 000000 101010
{} of them | 101010 000000 101010
{} each. | 101010 000000 101010 | 101010 101010 101010
{}\, | 101000 100010 101000 | 101010 101010 101000
{}\; | 101000 100010 101000 | 101010 101010 101000
{}\  | 101000 000000 101000 | 101010 101010 101000
{}\: | 101000 100010 101000 | 101010 101010 101000
{}\! | 101000 101010 101000 | 101010 101010 101000
{}~ | 101000 000000 101000 | 101010 101010 101000
{}\quad | 101000 100010 101000 | 101010 101010 101000
{} \\ | 101010 000000 101010 | 101010 101010 101010
{}\text{{ cm}} | 101000 101010 101000 | 101010 101010 101000
{}\,\text{{cm}} | 101000 100010 101000 | 101010 101010 101000
{}^\circ | 101000 100010 101000 | 101010 101010 101000
{}° | 101000 000000 101000
{} °C | 101010 000000 101010
{}\text{{.}} | 101000 101010 101000 | 101010 101010 101000
{} (approx) | 101010 000000 101010 | 101010 101010 101010
{} (in kg) | 101010 000000 101010
{}, because 2 is even | 000000 000000 101010
{}. So it is | 101010 000000 101010
{} - done | 101000 000000 101000
{} — done | 101010 000000 101010
{}x | 101000 000000 101000 | 000000 000000 101000
{}th | 101000 101010 101000 | 101010 101010 101000
-{} | 010001 010001 010001 | 010101 010101 010001
+{} | 000000 100010 000000 | 101010 101010 000000
"""
"""What stands around a number | math-verify's verdicts | the reward's, if they differ. There is a word for each of
`FORMS`, with a digit for each of `NUMBERS` as the right answer, and for its opposite."""
STRICTER = ("a {}", "{}!", "{} %", "{}x")
"""What is a symbol, a factorial or a percentage to the reward, where math-verify takes the number alone."""


@pytest.mark.parametrize("row", GRID.strip("\n").splitlines(), ids=lambda row: row.split(" | ")[0])
def test_number_in_other_text_is_judged_as_recorded(row: str) -> None:
    around, theirs, *others = row.split(" | ")
    (ours,) = others or [theirs]
    found = []
    for form in FORMS:
        completions = [form.format(around.format(number)) for number, _ in NUMBERS]
        pairs = zip(NUMBERS, completions, strict=True)
        found.append([rewards.is_right(answer, completion) for answers, completion in pairs for answer in answers])
    assert " ".join("".join(str(int(verdict)) for verdict in verdicts) for verdicts in found) == ours
    is_stricter = any(int(one) > int(other) for one, other in zip(theirs, ours, strict=True) if one != " ")
    assert is_stricter == (around in STRICTER)


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("-3", "The answer is −3.", True),
        ("3", "The answer is −3.", False),
        ("-3", "so x = −3", True),
        ("200000", r"The profit is \$200,000.", True),
        ("1200.5", r"It is **\$1,200.50** in total", True),
        ("5/4", "The answer is 1 1/4.", True),
        ("1", "The answer is 1 1/4.", False),
        ("5/4", "So it takes 1 1/4 cups.", True),
        ("3/2", "It takes 1½ cups.", True),
        ("1", "It takes 1½ cups.", False),
        ("1/2", "It takes ½ of a cup.", True),
        ("-5", "The answer is -$5.", True),
        ("5", "The answer is -$5.", False),
        ("1/4", "1 hour, 1/4 of it", True),
        ("6", r"It cost \$5, then \$6.", True),
        ("6/5", "The answer is 6/5", True),
    ],
)
def test_unmarked_number_is_read_as_written(answer: str, text: str, expected: bool) -> None:
    assert rewards.is_right(answer, text) == expected
