//! The Rust sources that the book is checked against.

use super::markdown;
use anyhow::{Context as _, Result, bail, ensure};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;
use syn::{BinOp, Expr, Item, Lit, UseTree};

/// The crates whose types and constants the book shows.
const ROOTS: [&str; 2] = ["metadata-common", "metadata-user"];

/// The longest chain of constants that refer to each other.
const DEPTH: u32 = 16;

/// All source files: the text of each, and the syntax trees of those already parsed.
pub(super) struct Code {
    files: Vec<(PathBuf, String)>,
    parsed: RefCell<BTreeMap<PathBuf, Rc<syn::File>>>,
}

/// The value of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Number(u128),
    Time(Duration),
}

impl Value {
    /// Returns the spellings that prose may use for the value, the shortest last.
    pub(super) fn forms(&self) -> Vec<String> {
        match self {
            Self::Number(number) => {
                let units = [(10, "KiB"), (20, "MiB"), (30, "GiB")];
                let whole = units.into_iter().filter(|(shift, _)| *number != 0 && number % (1 << shift) == 0);
                let units = whole.map(|(shift, unit)| format!("{} {unit}", grouped(number >> shift)));
                [grouped(*number)].into_iter().chain(units).collect()
            }
            Self::Time(time) if time.as_secs() >= 60 && time.as_secs().is_multiple_of(60) => {
                vec![format!("{} s", time.as_secs()), format!("{} minutes", time.as_secs() / 60)]
            }
            Self::Time(time) if time.subsec_nanos() == 0 => vec![format!("{} s", time.as_secs())],
            Self::Time(time) => vec![format!("{} s", time.as_secs_f64()), format!("{} ms", time.as_millis())],
        }
    }
}

/// Formats a number with a comma before every three digits.
fn grouped(number: u128) -> String {
    let digits = number.to_string();
    let places = digits.len();
    let commas = |(at, digit): (usize, char)| {
        let comma = at > 0 && (places - at).is_multiple_of(3);
        comma.then_some(',').into_iter().chain([digit])
    };
    digits.chars().enumerate().flat_map(commas).collect()
}

impl Code {
    /// Reads every source file below [`ROOTS`].
    pub(super) fn read() -> Result<Self> {
        let mut paths = Vec::new();
        for root in ROOTS {
            markdown::collect(Path::new(root), "rs", &mut paths)?;
        }
        let read = |path: PathBuf| Ok((path.clone(), fs::read_to_string(shell::top().join(path))?));
        Ok(Self { files: paths.into_iter().map(read).collect::<Result<_>>()?, parsed: RefCell::default() })
    }

    #[cfg(test)]
    pub(super) fn of(files: &[(&str, &str)]) -> Self {
        Self {
            files: files.iter().map(|(path, text)| (path.into(), (*text).to_owned())).collect(),
            parsed: RefCell::default(),
        }
    }

    /// Returns each file's path, relative to the top of the project, and its text.
    pub(super) fn texts(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.files.iter().map(|(path, text)| (path.as_path(), text.as_str()))
    }

    /// Parses a file, or returns the syntax tree of an earlier call.
    pub(super) fn parsed(&self, path: &Path, text: &str) -> Result<Rc<syn::File>> {
        if let Some(file) = self.parsed.borrow().get(path) {
            return Ok(Rc::clone(file));
        }
        let file = syn::parse_file(text).with_context(|| format!("cannot parse {}", path.display()))?;
        let file = Rc::new(file);
        self.parsed.borrow_mut().insert(path.to_owned(), Rc::clone(&file));
        Ok(file)
    }

    /// Reads the one file of this name below [`ROOTS`]. It is not a Rust file.
    pub(super) fn file(&self, name: &str) -> Result<String> {
        let ending = Path::new(name)
            .extension()
            .context("the file name has no extension")?
            .to_string_lossy()
            .into_owned();
        let mut found = Vec::new();
        for root in ROOTS {
            markdown::collect(Path::new(root), &ending, &mut found)?;
        }
        found.retain(|path| path.ends_with(name));
        let [path] = found.as_slice() else { bail!("expected one {name}, found {found:?}") };
        Ok(fs::read_to_string(shell::top().join(path))?)
    }

    /// Returns the items with this name, each with its file. `word` is the keyword before the name; it is empty for an
    /// item that a macro defines.
    pub(super) fn items(
        &self,
        word: &str,
        name: &str,
        is: impl Fn(&Item) -> bool,
    ) -> Result<Vec<(&Path, Item)>> {
        let mut found = Vec::new();
        let written = |text: &str| match word {
            "" => text.contains(name) && text.contains("macro_rules!"),
            word => text.contains(&format!("{word} {name}")),
        };
        for (path, text) in self.texts().filter(|(_, text)| written(text)) {
            let file = self.parsed(path, text)?;
            found.extend(file.items.iter().filter(|item| is(item)).map(|item| (path, item.clone())));
        }
        Ok(found)
    }

    /// Returns the value of a constant: `NAME`, or `file::NAME` if several files have one.
    pub(super) fn constant(&self, name: &str) -> Result<Value> {
        let (place, name) = name.rsplit_once("::").unwrap_or(("", name));
        self.valued(name, &place.split("::").collect::<Vec<_>>(), DEPTH)
    }

    /// Replaces each code span that names a constant by the constant's value. `from` is the file that has `text`.
    pub(super) fn valued_in(&self, from: &Path, text: &str) -> String {
        let value = |span: &str| {
            let words: Vec<String> = span.split("::").map(str::to_owned).collect();
            let name = words.last()?;
            let constant = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
            let value = (name.len() > 2 && name.chars().all(constant))
                .then(|| self.meant(from, &words, DEPTH).ok())??;
            let mut forms = value.forms();
            // A smaller number may count something other than bytes, so it gets no unit.
            if matches!(value, Value::Number(number) if number < 1 << 20) {
                forms.drain(1..);
            }
            forms.pop()
        };
        let part = |(index, part): (usize, &str)| match (index % 2, value(part)) {
            (0, _) => part.to_owned(),
            (_, Some(value)) => value,
            (_, None) => format!("`{part}`"),
        };
        text.split('`').enumerate().map(part).collect()
    }

    /// Returns the value of the constant that `words` name in a file: an imported constant, or else one of the file
    /// itself.
    fn meant(&self, from: &Path, words: &[String], depth: u32) -> Result<Value> {
        let (last, before) = words.split_last().context("the path is empty")?;
        let before = match before {
            [] => self.imported(from, last),
            before => before.to_vec(),
        };
        let own = || {
            from.iter().map(|part| Path::new(part).file_stem().unwrap_or(part).to_string_lossy().into_owned())
        };
        let before: Vec<String> = if before.is_empty() { own().collect() } else { before };
        self.valued(last, &before.iter().map(String::as_str).collect::<Vec<_>>(), depth)
    }

    fn valued(&self, name: &str, place: &[&str], depth: u32) -> Result<Value> {
        ensure!(depth > 0, "{name} refers to a chain of more than {DEPTH} constants");
        let candidates = self.constants(name)?;
        let (path, expression) = match best(&candidates, place, |(path, _)| path)? {
            Some((path, expression)) => (path, expression),
            None => bail!("there is no constant {name}"),
        };
        evaluated(expression, &|named| {
            let words: Vec<String> = named.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.meant(path, &words, depth - 1)
        })
        .with_context(|| format!("{name} in {}", path.display()))
    }

    /// Returns every constant with this name, including associated constants, with its file, the modules around it and
    /// its expression.
    fn constants(&self, name: &str) -> Result<Vec<(PathBuf, Expr)>> {
        let mut found = Vec::new();
        for (path, text) in self.texts().filter(|(_, text)| text.contains(&format!("const {name}:"))) {
            within(&self.parsed(path, text)?.items, path, name, &mut found);
        }
        Ok(found)
    }

    /// Returns the path from which a file imports a name, or an empty path if it does not import it.
    pub(super) fn imported(&self, from: &Path, name: &str) -> Vec<String> {
        let text = self.texts().find(|(path, _)| from.starts_with(path));
        let Some(Ok(file)) = text.map(|(path, text)| self.parsed(path, text)) else { return Vec::new() };
        let uses = file
            .items
            .iter()
            .filter_map(|item| if let Item::Use(one) = item { Some(&one.tree) } else { None });
        uses.filter_map(|tree| led(tree, name)).next().unwrap_or_default()
    }
}

/// Adds the constants with this name among `items` to `found`.
fn within(items: &[Item], path: &Path, name: &str, found: &mut Vec<(PathBuf, Expr)>) {
    for item in items {
        match item {
            Item::Const(one) if one.ident == name => found.push((path.to_owned(), (*one.expr).clone())),
            Item::Impl(block) => found.extend(block.items.iter().filter_map(|item| match item {
                syn::ImplItem::Const(one) if one.ident == name => Some((path.to_owned(), one.expr.clone())),
                _ => None,
            })),
            Item::Mod(syn::ItemMod { ident, content: Some((_, items)), .. }) if ident != "tests" => {
                within(items, &path.join(ident.to_string()), name, found);
            }
            _ => {}
        }
    }
}

/// Returns the path segments of an import that ends in `name`.
fn led(tree: &UseTree, name: &str) -> Option<Vec<String>> {
    match tree {
        UseTree::Path(path) => {
            let rest = led(&path.tree, name)?;
            Some([vec![path.ident.to_string()], rest].concat())
        }
        UseTree::Name(one) if one.ident == name => Some(Vec::new()),
        UseTree::Group(group) => group.items.iter().find_map(|tree| led(tree, name)),
        _ => None,
    }
}

/// Returns the candidate whose path shares most words with `place`. A tie is an error.
pub(super) fn best<'a, T>(
    candidates: &'a [T],
    place: &[&str],
    path: impl Fn(&'a T) -> &'a Path,
) -> Result<Option<&'a T>> {
    let score = |one: &'a T| {
        let parts: Vec<_> = path(one).iter().map(Path::new).filter_map(Path::file_stem).collect();
        // A crate is named by its directory, with or without the common prefix `metadata_`.
        let is = |word: &&&str| {
            parts.iter().any(|part| {
                *part == **word || word.strip_prefix("metadata_").is_some_and(|rest| *part == rest)
            })
        };
        place.iter().filter(is).count()
    };
    let Some(most) = candidates.iter().map(score).max() else { return Ok(None) };
    let chosen: Vec<_> = candidates.iter().filter(|one| score(one) == most).collect();
    let [one] = chosen.as_slice() else {
        let paths: Vec<_> = chosen.iter().map(|one| path(one).display().to_string()).collect();
        bail!("several constants or types have this name: {}; write file::NAME", paths.join(", "));
    };
    Ok(Some(one))
}

/// Evaluates the expression of a constant.
fn evaluated(expression: &Expr, of: &dyn Fn(&syn::Path) -> Result<Value>) -> Result<Value> {
    let number = |expression: &Expr| match evaluated(expression, of)? {
        Value::Number(number) => Ok(number),
        Value::Time(_) => bail!("a time where a number is expected"),
    };
    Ok(match expression {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Int(int) => Value::Number(int.base10_parse()?),
            _ => bail!("expected a number"),
        },
        Expr::Paren(inner) => evaluated(&inner.expr, of)?,
        Expr::Cast(inner) => evaluated(&inner.expr, of)?,
        Expr::Path(path) => of(&path.path)?,
        Expr::Binary(both) => {
            let (left, right) = (number(&both.left)?, number(&both.right)?);
            let value = match both.op {
                BinOp::Add(_) => left.checked_add(right),
                BinOp::Sub(_) => left.checked_sub(right),
                BinOp::Mul(_) => left.checked_mul(right),
                BinOp::Div(_) => left.checked_div(right),
                BinOp::Shl(_) => left.checked_shl(u32::try_from(right)?),
                _ => None,
            };
            Value::Number(value.context("an operator that `cargo xtask book` cannot evaluate")?)
        }
        Expr::Call(call) => {
            let Expr::Path(function) = call.func.as_ref() else {
                bail!("a call that `cargo xtask book` cannot evaluate")
            };
            let amount = u64::try_from(number(call.args.first().context("the call has no argument")?)?)?;
            match function.path.segments.last().context("the path is empty")?.ident.to_string().as_str() {
                "from_secs" => Value::Time(Duration::from_secs(amount)),
                "from_millis" => Value::Time(Duration::from_millis(amount)),
                "from_micros" => Value::Time(Duration::from_micros(amount)),
                other => bail!("`{other}` is a function that `cargo xtask book` cannot evaluate"),
            }
        }
        _ => bail!("an expression that `cargo xtask book` cannot evaluate"),
    })
}

#[cfg(test)]
mod tests {
    use super::{Code, Value};
    use std::time::Duration;

    #[test]
    fn values_have_the_forms_that_prose_uses() {
        let cases: [(Value, &[&str]); 4] = [
            (Value::Number(65_536), &["65,536", "64 KiB"]),
            (Value::Number(4 << 20), &["4,194,304", "4,096 KiB", "4 MiB"]),
            (Value::Time(Duration::from_secs(300)), &["300 s", "5 minutes"]),
            (Value::Time(Duration::from_millis(1_500)), &["1.5 s", "1500 ms"]),
        ];
        for (value, forms) in cases {
            assert_eq!(value.forms(), forms, "{value:?}");
        }
    }

    #[test]
    fn constants_are_evaluated_over_files() {
        let code = Code::of(&[
            (
                "a/src/one.rs",
                "pub const A: usize = two::B as usize * 4;\nconst T: Duration = Duration::from_millis(1_500);",
            ),
            ("a/src/two.rs", "pub const B: u32 = 1 << 4;\nstruct S;\nimpl S { pub const C: usize = B - 1; }"),
            ("a/src/three.rs", "pub const B: u32 = 3;"),
        ]);
        let cases = [
            ("A", Some(Value::Number(64))),
            ("two::B", Some(Value::Number(16))),
            ("C", Some(Value::Number(15))),
            ("T", Some(Value::Time(Duration::from_millis(1_500)))),
            ("B", None),
            ("D", None),
        ];
        for (name, value) in cases {
            assert_eq!(code.constant(name).ok(), value, "{name}");
        }
    }
}
