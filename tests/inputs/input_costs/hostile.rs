//! Texts of hostile authors: each is a shape that costs more than it weighs, if a parser lets it, at about the wished
//! length in bytes.

use fastrand::Rng;

/// The characters of random words: letters, marks of YAML, JSON and XML, and odd ones of Unicode.
const CHARACTERS: &[&str] = &[
    "a",
    "0",
    "9",
    " ",
    "\n",
    "\r\n",
    "\t",
    ":",
    ": ",
    "- ",
    ",",
    "[",
    "]",
    "{",
    "}",
    "\"",
    "'",
    "&a ",
    "*a",
    "<<: ",
    "? ",
    "|",
    ">",
    "#",
    " #",
    "!",
    "!!str ",
    "%",
    "@",
    "`",
    "\\",
    "\\u0000",
    "\\x41",
    "---\n",
    "...\n",
    "~",
    "null",
    "true",
    "yes",
    "1e999",
    "0x",
    "-",
    ".",
    "<",
    ">",
    "&amp;",
    "<![CDATA[",
    "]]>",
    "<!--",
    "/",
    "=",
    "\u{feff}",
    "\u{0}",
    "\u{7f}",
    "\u{85}",
    "\u{a0}",
    "\u{2028}",
    "\u{202e}",
    "\u{301}",
    "\u{fffd}",
    "\u{10ffff}",
    "é",
    "😀",
    "\u{1b}[2J",
];

fn list(item: &str, bytes: usize) -> String {
    vec![item; (bytes / (item.len() + 1)).max(1)].join(",")
}

/// Nested anchors, each a list of the one before.
fn laughs(bytes: usize) -> String {
    const LEVELS: usize = 6;
    let each = bytes / LEVELS;
    let mut text = format!("{{version: 2, l0: &l0 [{}]", list("x", each));
    for n in 1..LEVELS {
        text.push_str(&format!(", l{n}: &l{n} [{}]", list(&format!("*l{}", n - 1), each)));
    }
    text + "}\n"
}

/// Nested anchors within the parser's budget, in a mapping that is a key, so that each level is kept once more.
fn key_of_aliases(bytes: usize) -> String {
    let [l0, l1, l2] = [list("x", 42), list("*l0", 40), list("*l1", 40)];
    let text = format!("{{version: 2, l0: &l0 [{l0}], l1: &l1 [{l1}], l2: &l2 [{l2}]}}: x # ");
    let rest = bytes.saturating_sub(text.len());
    text + &"x".repeat(rest) + "\n"
}

/// One long scalar, and as many aliases of it as fit.
fn echoes(bytes: usize) -> String {
    format!("version: 2\na: &a \"x\\n{}\"\nb: [{}]\n", "x".repeat(bytes / 2), list("*a", bytes / 2))
}

/// Mappings that merge each other.
fn merges(bytes: usize) -> String {
    let mut text = String::from("version: 2\nm0: &m0 {k: v}\n");
    for n in 1.. {
        if text.len() >= bytes {
            break;
        }
        let below = n - 1;
        text.push_str(&format!("m{n}: &m{n} {{<<: [*m{below}, *m{below}], k{n}: *m{below}}}\n"));
    }
    text
}

/// Anchors inside each other, so that each node is kept for all that surround it.
fn nests(bytes: usize) -> String {
    let levels = (bytes / 32).min(60);
    let open: String = (0..levels).map(|n| format!("&n{n} [")).collect();
    format!("a: {open}{}{}\n", list("x", bytes / 2), "]".repeat(levels))
}

/// A tag whose prefix is long, used often.
fn tags(bytes: usize) -> String {
    format!("%TAG !e! tag:{}\n---\na: [{}]\n", "x".repeat(bytes / 2), list("!e!t 1", bytes / 2))
}

fn keys(bytes: usize, mut key: impl FnMut(usize) -> String) -> String {
    let mut text = String::new();
    for n in 0.. {
        if text.len() >= bytes {
            break;
        }
        text.push_str(&key(n));
    }
    text
}

/// A shape of text, by name.
pub(crate) type Shape = (&'static str, fn(usize) -> String);

/// Shapes of YAML; those with braces alone are JSON, too.
pub(crate) const SHAPES: [Shape; 34] = [
    ("laughs", laughs),
    ("a key of aliases", key_of_aliases),
    ("echoes", echoes),
    ("merges", merges),
    ("nests", nests),
    ("tags", tags),
    ("deep lists", |n| "[".repeat(n / 2) + &"]".repeat(n / 2)),
    ("open lists", |n| "[".repeat(n)),
    ("open mappings", |n| "{\"a\":".repeat(n / 5)),
    ("deep mappings", |n| "{\"a\":".repeat(n / 6) + "1" + &"}".repeat(n / 6)),
    ("deep blocks", |n| (0..n.isqrt()).map(|n| format!("{}a:\n", " ".repeat(n))).collect()),
    ("deep dashes", |n| "- ".repeat(n / 2)),
    ("many zeros", |n| format!("[{}]", list("0", n))),
    ("many texts", |n| format!("{{\"a\":[{}]}}", list("\"\"", n))),
    ("small mappings", |n| format!("[{}]", list("{\"a\":0}", n))),
    ("empty lists", |n| format!("{{\"network\":{{}},\"version\":2,\"a\":[{}]}}", list("[]", n))),
    ("many keys", |n| keys(n, |n| format!("k{n}: v\n"))),
    ("many keys of JSON", |n| format!("{{{}\"z\":1}}", keys(n, |n| format!("\"k{n}\":1,")))),
    ("one key again and again", |n| keys(n, |_| "k: v\n".into())),
    ("many nics", |n| {
        format!(
            "{{\"network\":{{\"nics\":[{}{{}}]}}}}",
            keys(n, |n| format!("{{\"mac\":\"52:54:00:{n:06x}\"}},"))
        )
    }),
    ("long plain", |n| format!("version: 2\na: {}\n", "x".repeat(n))),
    ("long words", |n| format!("a: {}\n", "x ".repeat(n / 2))),
    ("long quoted", |n| format!("{{\"a\": \"{}\"}}", "\\u00e9".repeat(n / 6))),
    ("long block", |n| format!("a: |\n{}", "  line\n".repeat(n / 7))),
    ("long folded", |n| format!("a: >\n{}", "  line\n\n".repeat(n / 8))),
    ("long comment", |n| format!("# {}\n", "x".repeat(n))),
    ("many comments", |n| "# x\n".repeat(n / 4)),
    ("long number", |n| format!("{{\"a\": 1{}}}", "0".repeat(n))),
    ("huge exponent", |n| format!("{{\"a\": 1e{}}}", "9".repeat(n))),
    ("many documents", |n| "---\na: 1\n".repeat(n / 9)),
    ("many lines", |n| "\r\n".repeat(n / 2)),
    ("nothing but NUL", |n| "\0".repeat(n)),
    ("complex keys", |n| "? [a]\n: b\n".repeat(n / 10)),
    ("spaces", |n| format!("a:{}b", " ".repeat(n))),
];

/// Shapes of XML, of lists of settings, and of forms, which no YAML has.
pub(crate) const OTHERS: [Shape; 14] = [
    ("elements", |n| format!("<a>{}</a>", "<b/>".repeat(n / 4))),
    ("open elements", |n| "<a>".repeat(n / 3)),
    ("deep elements", |n| "<a>".repeat(n / 7) + &"</a>".repeat(n / 7)),
    ("attributes", |n| format!("<a {}/>", keys(n, |n| format!("a{n}='' ")))),
    ("namespaces", |n| format!("<a {}/>", keys(n, |n| format!("xmlns:n{n}='u' ")))),
    ("namespaces inside", |n| {
        let half = keys(n / 2, |n| format!("xmlns:n{n}='u' "));
        format!("<a {half}>{}</a>", "<b xmlns:z='z'/>".repeat(n / 32))
    }),
    ("entities", |n| {
        let inner = "&a;".repeat(n / 3);
        format!("<!DOCTYPE x [<!ENTITY a \"{}\">]><x>{inner}</x>", "x".repeat(n / 3))
    }),
    ("references", |n| format!("<a>{}</a>", "&amp;".repeat(n / 5))),
    ("comments", |n| format!("<a>{}</a>", "x<!---->".repeat(n / 8))),
    ("settings", |n| keys(n, |n| format!("net{n}: virtio=BC:24:11:2C:69:EC,bridge=vmbr0\n"))),
    ("notes", |n| "#\n".repeat(n / 2)),
    ("percents", |n| format!("#{}\n", "%41".repeat(n / 3))),
    ("commas", |n| format!("smbios1: {}\n", keys(n, |n| format!("k{n}=v,")))),
    ("fields of a form", |n| keys(n, |n| format!("k{n}=v%00&"))),
];

/// A random text of at most `bytes`.
pub(crate) fn words(random: &mut Rng, bytes: usize) -> String {
    let few: Vec<_> = (0..random.usize(1..8)).map(|_| CHARACTERS[random.usize(..CHARACTERS.len())]).collect();
    let mut text = String::new();
    while text.len() < bytes {
        let all = random.u8(..4) == 0;
        text.push_str(if all {
            CHARACTERS[random.usize(..CHARACTERS.len())]
        } else {
            few[random.usize(..few.len())]
        });
        if random.u8(..64) == 0 {
            text.push_str(&few[random.usize(..few.len())].repeat(random.usize(..64)));
        }
    }
    text
}

/// Changes a text at some places, by pieces of it and of [`CHARACTERS`].
pub(crate) fn mutate(random: &mut Rng, text: &str) -> String {
    let mut text: Vec<char> = text.chars().collect();
    for _ in 0..random.usize(1..6) {
        let at = random.usize(..=text.len());
        let end = random.usize(at..=text.len().min(at + 64));
        match random.u8(..4) {
            0 => drop(text.drain(at..end)),
            1 => {
                let piece: Vec<char> = text[at..end].to_vec();
                let times = random.usize(1..32);
                text.splice(at..at, piece.repeat(times)).for_each(drop);
            }
            2 => text.truncate(at),
            _ => {
                let piece = CHARACTERS[random.usize(..CHARACTERS.len())];
                text.splice(at..at, piece.chars()).for_each(drop);
            }
        }
    }
    text.into_iter().collect()
}
