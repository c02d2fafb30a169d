//! The imports among the modules of a room, read from the sources.
//!
//! A room is a directory of modules: `src` of a crate, or a directory below it. Comments, strings, code under
//! `#[cfg(test)]` and the imports of the room's root file do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// For each module of a room: the modules that it imports, each with a text that names one import.
pub(crate) type Graph = BTreeMap<String, BTreeMap<String, String>>;

/// Reads the modules below `room`, a directory below `src`.
pub(crate) fn graph(src: &Path, room: &Path) -> Graph {
    let base: Vec<String> = parts(room.strip_prefix(src).expect("a room below src"));
    let mut files = Vec::new();
    collect(room, &mut files);
    let sources: BTreeMap<Vec<String>, Source> =
        files.iter().map(|file| (module(src, file), Source::read(file))).collect();
    let only_tests: Vec<Vec<String>> = sources
        .iter()
        .flat_map(|(at, source)| {
            source.tests.iter().map(|name| [&at[..], std::slice::from_ref(name)].concat())
        })
        .collect();
    let is_test = |at: &Vec<String>| only_tests.iter().any(|test| at.starts_with(test));
    let inside = |path: &[String]| path.strip_prefix(&base[..]).map(<[String]>::to_vec);
    let modules: BTreeSet<String> =
        sources.keys().filter(|at| !is_test(at)).filter_map(|at| inside(at)?.first().cloned()).collect();
    // An import of a name that the root file itself imports from a module counts as an import of that module.
    let root = sources.get(&base).into_iter().flat_map(|source| source.paths(&base));
    let again: BTreeMap<String, String> = root
        .filter_map(|path| {
            let path = inside(&path)?;
            let [first, .., last] = &path[..] else { return None };
            modules.contains(first).then(|| (last.clone(), first.clone()))
        })
        .collect();
    let mut graph = Graph::new();
    for (at, source) in sources.iter().filter(|(at, _)| !is_test(at)) {
        let Some(own) = inside(at).and_then(|own| own.first().cloned()) else { continue };
        for path in source.paths(at) {
            let Some(named) = inside(&path).and_then(|path| path.first().cloned()) else { continue };
            let target = if modules.contains(&named) { Some(&named) } else { again.get(&named) };
            if let Some(target) = target.filter(|target| **target != own) {
                let used = format!("{} uses {}", at.join("::"), path.join("::"));
                graph.entry(own.clone()).or_default().entry(target.clone()).or_insert(used);
            }
        }
    }
    graph
}

/// The words of each file below `src`, a crate's directory of sources, without those of its tests.
pub(crate) fn product(src: &Path) -> Vec<(PathBuf, Vec<String>)> {
    let mut files = Vec::new();
    collect(src, &mut files);
    let sources: Vec<_> =
        files.into_iter().map(|file| (module(src, &file), Source::read(&file), file)).collect();
    let tests: Vec<Vec<String>> = sources
        .iter()
        .flat_map(|(at, source, _)| {
            source.tests.iter().map(|name| [&at[..], std::slice::from_ref(name)].concat())
        })
        .collect();
    let is_product = |at: &[String]| !tests.iter().any(|test| at.starts_with(test));
    sources
        .into_iter()
        .filter(|(at, ..)| is_product(at))
        .map(|(_, source, file)| (file, source.words))
        .collect()
}

/// A shortest cycle of imports, as the text of each import; `None` if there is no cycle.
pub(crate) fn circle(graph: &Graph) -> Option<Vec<String>> {
    let circles = graph.keys().filter_map(|start| {
        let mut ways = vec![(start, Vec::new())];
        let mut seen = BTreeSet::new();
        while let Some((at, way)) = (!ways.is_empty()).then(|| ways.remove(0)) {
            for (next, used) in graph.get(at).into_iter().flatten() {
                let way = [&way[..], std::slice::from_ref(used)].concat();
                if next == start {
                    return Some(way);
                }
                if seen.insert(next) {
                    ways.push((next, way));
                }
            }
        }
        None
    });
    circles.min_by_key(Vec::len)
}

/// A directory of modules and all directories below it.
pub(crate) fn rooms(directory: &Path) -> Vec<PathBuf> {
    let below = std::fs::read_dir(directory).expect("a directory of modules");
    let below = below.map(|entry| entry.expect("an entry").path()).filter(|path| path.is_dir());
    let below = below.flat_map(|path| rooms(&path));
    std::iter::once(directory.to_owned()).chain(below).collect()
}

/// Every file below `directory`, with its words outside of comments, strings and code under `#[cfg(test)]`.
pub(crate) fn sources(directory: &Path) -> Vec<(PathBuf, Vec<String>)> {
    let mut files = Vec::new();
    collect(directory, &mut files);
    let main = directory.join("main.rs");
    files.extend(Some(main).filter(|main| main.exists()));
    files.into_iter().map(|file| (file.clone(), Source::read(&file).words)).collect()
}

pub(crate) fn collect(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("a directory of modules") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|ending| ending == "rs") && !path.ends_with("src/main.rs") {
            files.push(path);
        }
    }
}

fn parts(path: &Path) -> Vec<String> {
    path.iter().map(|part| part.to_str().expect("UTF-8").to_owned()).collect()
}

/// The path of a file's module in its crate.
fn module(src: &Path, file: &Path) -> Vec<String> {
    let mut module = parts(&file.strip_prefix(src).expect("a file below src").with_extension(""));
    if module.last().is_some_and(|name| name == "mod" || name == "lib") {
        module.pop();
    }
    module
}

/// The words of a file without its tests, and the names of its test modules.
#[derive(Debug, Default)]
struct Source {
    words: Vec<String>,
    tests: Vec<String>,
}

impl Source {
    fn read(file: &Path) -> Self {
        Self::new(&std::fs::read_to_string(file).expect("a source in UTF-8"))
    }

    fn new(text: &str) -> Self {
        let all = words(text);
        let (mut source, mut rest) = (Self::default(), &all[..]);
        let test = ["#", "[", "cfg", "(", "test", ")", "]"];
        while let Some(first) = rest.first() {
            let tested = rest.strip_prefix(&test.map(str::to_owned)[..]);
            let Some(item) = tested else {
                source.words.push(first.clone());
                rest = &rest[1..];
                continue;
            };
            let (item, after) = item.split_at(end_of_item(item));
            let named = item.windows(3).find(|three| three[0] == "mod" && three[2] == ";");
            source.tests.extend(named.map(|three| three[1].clone()));
            rest = after;
        }
        source
    }

    /// Every path within the crate that the file names, from the crate's root; `at` is the file's module.
    fn paths(&self, at: &[String]) -> Vec<Vec<String>> {
        let (mut paths, mut rest) = (Vec::new(), &self.words[..]);
        while let Some(word) = rest.first() {
            if word == "use" {
                let end = rest.iter().position(|word| word == ";").unwrap_or(rest.len());
                leaves(&rest[1..end], &[], &mut paths);
                rest = &rest[end..];
                continue;
            }
            if word == "crate" || word == "super" {
                let length = 1 + 2 * rest[1..].chunks(2).take_while(|two| is_step(two)).count();
                paths.push(rest[..length].iter().step_by(2).cloned().collect());
                rest = &rest[length..];
                continue;
            }
            rest = &rest[1..];
        }
        paths.into_iter().filter_map(|path| absolute(at, &path)).collect()
    }
}

fn is_step(words: &[String]) -> bool {
    matches!(words, [colons, name] if colons == "::" && is_name(name))
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphanumeric() || c == '_')
}

/// The number of words of the item that follows `#[cfg(test)]`.
fn end_of_item(words: &[String]) -> usize {
    let mut depth = 0;
    for (at, word) in words.iter().enumerate() {
        match word.as_str() {
            "{" => depth += 1,
            "}" if depth == 1 => return at + 1,
            "}" => depth -= 1,
            ";" if depth == 0 => return at + 1,
            _ => {}
        }
    }
    words.len()
}

/// Adds every path of a `use` to `paths`, with the braces expanded.
fn leaves(tree: &[String], before: &[String], paths: &mut Vec<Vec<String>>) {
    let names = tree.iter().take_while(|word| *word != "{" && *word != "as");
    let names = names.filter(|word| *word != "::" && *word != "self" && *word != "*");
    let path = [before, &names.cloned().collect::<Vec<_>>()[..]].concat();
    let Some(open) = tree.iter().position(|word| word == "{") else { return paths.push(path) };
    let (mut depth, mut start) = (0, open + 1);
    for (at, word) in tree.iter().enumerate().skip(open) {
        depth += i32::from(word == "{") - i32::from(word == "}");
        if (word == "," && depth == 1) || depth == 0 {
            if start < at {
                leaves(&tree[start..at], &path, paths);
            }
            start = at + 1;
        }
    }
}

/// A path from the crate's root; `None` for one of another crate.
fn absolute(at: &[String], path: &[String]) -> Option<Vec<String>> {
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "super" => {
            let up = path.iter().take_while(|name| *name == "super").count();
            Some([&at[..at.len().checked_sub(up)?], &path[up..]].concat())
        }
        _ => None,
    }
}

/// The names, `::` and single characters of a text, without comments, string literals and character literals.
fn words(text: &str) -> Vec<String> {
    let (mut words, mut rest) = (Vec::new(), text);
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(hashes) = raw_string(rest) {
            let (open, end) = (rest.find('"').unwrap_or(0) + 1, format!("\"{}", "#".repeat(hashes)));
            rest[open..].find(&end).map_or(rest.len(), |at| open + at + end.len())
        } else if first == '"' {
            quoted(rest)
        } else if first == '\'' {
            character(rest)
        } else if is_name(rest) {
            rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
        } else if rest.starts_with("::") {
            2
        } else {
            first.len_utf8()
        };
        let (word, after) = rest.split_at(length);
        if is_name(word) && raw_string(rest).is_none()
            || !word.starts_with(['/', '"', '\'']) && !word.trim().is_empty()
        {
            words.push(word.to_owned());
        }
        rest = after;
    }
    words
}

/// The number of `#` of a raw string at the start of the text; `None` if there is none.
fn raw_string(text: &str) -> Option<usize> {
    let inside = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
    let hashes = inside.len() - inside.trim_start_matches('#').len();
    inside[hashes..].starts_with('"').then_some(hashes)
}

/// The length of a string literal, in bytes.
fn quoted(text: &str) -> usize {
    let mut escaped = false;
    let end = text.char_indices().skip(1).find(|(_, c)| {
        let ends = *c == '"' && !escaped;
        escaped = *c == '\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |(at, _)| at + 1)
}

/// The length of a character literal, in bytes; 1 for the quote of a lifetime.
fn character(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    let Some((_, first)) = chars.next() else { return 1 };
    if first == '\\' {
        return text[3..].find('\'').map_or(text.len(), |at| at + 4);
    }
    chars.next().filter(|(_, c)| *c == '\'').map_or(1, |(at, _)| at + 1)
}

#[cfg(test)]
mod tests {
    use super::{Graph, Source, circle};

    fn paths(text: &str) -> Vec<String> {
        let at = ["a".to_owned(), "b".to_owned()];
        Source::new(text).paths(&at).iter().map(|path| path.join("::")).collect()
    }

    #[test]
    fn paths_are_read_from_uses_and_code_and_from_nothing_else() {
        for (text, expected) in [
            ("use crate::x::Y;", &["x::Y"][..]),
            ("use super::{c::D, super::e::{self, F}, g::*};", &["a::c::D", "e", "e::F", "a::g"]),
            ("use std::io; fn f() -> crate::x::Y { super::z() }", &["x::Y", "a::z"]),
            ("// use crate::x;\n/* crate::x */ const A: &str = \"crate::x \\\" crate::y\";", &[]),
            ("const A: &str = r#\"crate::x \" crate::y\"#; const B: char = '\"'; use crate::z;", &["z"]),
            ("fn f<'a>(x: &'a str) { crate::x::g::<'a>(x, '\\'') }", &["x::g"]),
            ("#[cfg(test)]\nmod tests { use crate::x; fn f() {} }\nuse crate::y;", &["y"]),
            ("#[cfg(test)] use crate::x;\nuse crate::y as z;", &["y"]),
        ] {
            assert_eq!(paths(text), expected, "{text}");
        }
        assert_eq!(Source::new("#[cfg(test)]\nmod proofs;").tests, ["proofs"]);
    }

    #[test]
    fn a_circle_is_reported_as_the_imports_that_form_it() {
        let graph = |edges: &[(&str, &str)]| {
            let mut graph = Graph::new();
            for (from, to) in edges {
                graph.entry((*from).into()).or_default().insert((*to).into(), format!("{from}-{to}"));
            }
            graph
        };
        assert_eq!(circle(&graph(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
        let tied = graph(&[("a", "b"), ("b", "c"), ("c", "a"), ("d", "c"), ("c", "d")]);
        assert_eq!(circle(&tied), Some(vec!["c-d".into(), "d-c".into()]));
    }
}
