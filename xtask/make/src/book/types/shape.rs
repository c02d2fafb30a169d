//! Reads the parts of a type's definition that a writer of YAML must know.

use crate::book::code::{self, Code};
use crate::book::dialects;
use anyhow::Result;
use std::path::{Path, PathBuf};
use syn::{Attribute, Fields, GenericArgument, Item, Meta, PathArguments, Type};

/// A type that was found, with its file, its doc comment and its form in YAML.
pub(super) struct Found {
    pub(super) file: PathBuf,
    pub(super) doc: String,
    pub(super) shape: Shape,
}

/// The form of a type in YAML.
pub(super) enum Shape {
    /// A mapping.
    Fields(Vec<Entry>),
    /// An enumeration: one of several words.
    Values(Vec<Entry>),
    /// A text, number or other value, described in words.
    Text(String),
}

/// A field of a mapping, or a word of an enumeration.
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) doc: String,
    pub(super) required: bool,
    pub(super) kind: Kind,
}

/// The type of a field.
#[derive(Default)]
pub(super) struct Kind {
    /// Whether the field is a list of this type.
    pub(super) many: bool,
    /// The type's name with the path before it, if the project defines the type.
    pub(super) path: Vec<String>,
    /// The description of any other type.
    pub(super) plain: &'static str,
}

/// Finds a type by the name that the file `from` uses for it.
pub(super) fn find(code: &Code, from: &Path, path: &[String]) -> Result<Option<Found>> {
    let Some((name, before)) = path.split_last() else { return Ok(None) };
    if let Some(words) = dialects::words(name) {
        let entry = |word: &str| Entry {
            name: word.to_owned(),
            doc: String::new(),
            required: false,
            kind: Kind::default(),
        };
        let shape = Shape::Values(words.into_iter().map(entry).collect());
        return Ok(Some(Found { file: from.to_path_buf(), doc: String::new(), shape }));
    }
    let mut candidates =
        code.items("struct", name, |item| matches!(item, Item::Struct(one) if one.ident == name))?;
    candidates.extend(code.items(
        "enum",
        name,
        |item| matches!(item, Item::Enum(one) if one.ident == name),
    )?);
    candidates.extend(code.items("", name, |item| is_macro_of(item, name))?);
    let mut place: Vec<String> =
        before.iter().filter(|word| !matches!(word.as_str(), "crate" | "super" | "self")).cloned().collect();
    if place.is_empty() {
        place = code.imported(from, name);
    }
    if place.is_empty() {
        place = from
            .iter()
            .map(|part| Path::new(part).file_stem().unwrap_or(part).to_string_lossy().into_owned())
            .collect();
    }
    let words: Vec<&str> = place.iter().map(String::as_str).collect();
    let Some((file, item)) = code::best(&candidates, &words, |(path, _)| path)? else { return Ok(None) };
    let (doc, shape) = match item {
        Item::Struct(one) => (doc(&one.attrs), structure(code, name, one)?),
        Item::Enum(one) if derives(&one.attrs, "Deserialize") => {
            (doc(&one.attrs), Shape::Values(variants(one)))
        }
        Item::Enum(one) => {
            (doc(&one.attrs), Shape::Text(expecting(code, name).unwrap_or_else(|| doc(&one.attrs))))
        }
        Item::Macro(one) => (String::new(), of_macro(&one.mac.tokens.to_string())),
        _ => return Ok(None),
    };
    let valued = |text: &str| code.valued_in(file, text);
    let shape = match shape {
        Shape::Fields(entries) => Shape::Fields(with_values(entries, valued)),
        Shape::Values(entries) => Shape::Values(with_values(entries, valued)),
        Shape::Text(text) => Shape::Text(valued(&text)),
    };
    Ok(Some(Found { file: file.to_path_buf(), doc: valued(&doc), shape }))
}

fn with_values(entries: Vec<Entry>, valued: impl Fn(&str) -> String) -> Vec<Entry> {
    entries.into_iter().map(|entry| Entry { doc: valued(&entry.doc), ..entry }).collect()
}

/// Describes a struct: a mapping, unless it is deserialised from a text.
fn structure(code: &Code, name: &str, item: &syn::ItemStruct) -> Result<Shape> {
    if let Some(expected) = expected(code, name)? {
        return Ok(Shape::Text(expected));
    }
    let Fields::Named(named) = &item.fields else { return Ok(Shape::Text(doc(&item.attrs))) };
    if !derives(&item.attrs, "Deserialize") {
        return Ok(Shape::Text(expecting(code, name).unwrap_or_else(|| doc(&item.attrs))));
    }
    let lenient = serde(&item.attrs, "default").is_some();
    let kept = named.named.iter().filter(|field| serde(&field.attrs, "skip").is_none());
    let entry = |field: &syn::Field| {
        let own = field.ident.as_ref().map(ToString::to_string).unwrap_or_default();
        let (kind, optional) = kind(&field.ty);
        Entry {
            name: serde(&field.attrs, "rename").flatten().unwrap_or(own),
            doc: doc(&field.attrs),
            required: !(lenient || optional || serde(&field.attrs, "default").is_some()),
            kind,
        }
    };
    Ok(Shape::Fields(kept.map(entry).collect()))
}

fn variants(item: &syn::ItemEnum) -> Vec<Entry> {
    let case = serde(&item.attrs, "rename_all").flatten().unwrap_or_default();
    let entry = |variant: &syn::Variant| {
        let own = variant.ident.to_string();
        let cased = match case.as_str() {
            "lowercase" => own.to_lowercase(),
            "kebab-case" => snake(&own, '-'),
            "snake_case" => snake(&own, '_'),
            _ => own,
        };
        let name = serde(&variant.attrs, "rename").flatten().unwrap_or(cased);
        Entry { name, doc: doc(&variant.attrs), required: false, kind: Kind::default() }
    };
    item.variants.iter().map(entry).collect()
}

fn snake(name: &str, between: char) -> String {
    let parted = name.chars().enumerate().flat_map(|(at, c)| {
        let gap = (at > 0 && c.is_uppercase()).then_some(between);
        gap.into_iter().chain(c.to_lowercase())
    });
    parted.collect()
}

/// Returns `const EXPECTED` of a type that is deserialised from a text.
fn expected(code: &Code, name: &str) -> Result<Option<String>> {
    let is =
        |item: &Item| matches!(item, Item::Impl(one) if one.trait_.is_some() && named(&one.self_ty) == name);
    for (_, item) in code.items("for", name, is)? {
        let Item::Impl(block) = item else { continue };
        for item in block.items {
            if let syn::ImplItem::Const(one) = item
                && one.ident == "EXPECTED"
                && let syn::Expr::Lit(literal) = one.expr
                && let syn::Lit::Str(text) = literal.lit
            {
                return Ok(Some(text.value()));
            }
        }
    }
    Ok(None)
}

/// Returns true for a macro that defines the type `name`. Attributes may precede the name.
fn is_macro_of(item: &Item, name: &str) -> bool {
    let Item::Macro(one) = item else { return false };
    // Macros that only list types do not describe them.
    let tokens = one.mac.tokens.to_string();
    one.ident.is_none() && tokens.trim_start().starts_with(['#', '/']) && defined(&tokens).0 == name
}

/// Splits the tokens of a macro into the name that it defines and the rest. Attributes and comments come first.
fn defined(tokens: &str) -> (&str, &str) {
    let mut rest = tokens.trim_start();
    while let Some(attribute) = rest.strip_prefix(['#', '/']) {
        let end = if attribute.starts_with('/') { "\n" } else { "\"]" };
        rest = attribute.split_once(end).map_or("", |(_, after)| after).trim_start();
    }
    let end = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
    (&rest[..end], rest[end..].trim_start())
}

/// The text that a macro gives as its expectation: `Name, "a word", …`.
fn of_macro(tokens: &str) -> Shape {
    let (_, body) = defined(tokens);
    Shape::Text(body.split('"').nth(1).unwrap_or_default().to_owned())
}

/// Returns the first text that a hand-written deserialiser gives as its expectation.
fn expecting(code: &Code, name: &str) -> Option<String> {
    let reader = format!("Deserialize<'de> for {name} ");
    let after = code.texts().find_map(|(_, text)| text.split_once(&reader).map(|(_, after)| after))?;
    let (_, written) = after.split_once("write_str(\"")?;
    written.split_once('"').map(|(expected, _)| expected.to_owned())
}

/// Returns the kind of a type, and whether the field is optional.
fn kind(ty: &Type) -> (Kind, bool) {
    let Type::Path(path) = ty else { return (Kind::default(), false) };
    let Some(last) = path.path.segments.last() else { return (Kind::default(), false) };
    let inner = || match &last.arguments {
        PathArguments::AngleBracketed(arguments) => arguments.args.iter().find_map(|one| match one {
            GenericArgument::Type(ty) => Some(kind(ty).0),
            _ => None,
        }),
        _ => None,
    };
    let plain = match last.ident.to_string().as_str() {
        "Option" => return (inner().unwrap_or_default(), true),
        "Vec" => return (Kind { many: true, ..inner().unwrap_or_default() }, false),
        "Box" | "Arc" => return (inner().unwrap_or_default(), false),
        "String" => "text",
        "PathBuf" => "path",
        "bool" => "`true` or `false`",
        "u8" | "u16" | "u32" | "u64" | "usize" | "i64" => "number",
        "IpAddr" => "IP address",
        "Ipv4Addr" => "IPv4 address",
        "SocketAddr" => "address and port",
        "Value" => "text or mapping",
        "BTreeMap" | "HashMap" => "mapping",
        _ => "",
    };
    let path = path.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
    (Kind { many: false, path: if plain.is_empty() { path } else { Vec::new() }, plain }, false)
}

fn named(ty: &Type) -> String {
    let Type::Path(path) = ty else { return String::new() };
    path.path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default()
}

/// Returns a doc comment as one line of Markdown. Links into the code become code spans.
pub(super) fn doc(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            syn::Expr::Lit(literal) => match &literal.lit {
                syn::Lit::Str(text) => Some(text.value().trim().to_owned()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    });
    let text =
        lines.collect::<Vec<_>>().join(" ").trim().replace("[`", "`").replace("`]", "`").replace('|', "\\|");
    // YAML has `null` for `None`.
    text.replace("`None`", "`null`")
}

/// Returns a word of `#[serde(…)]`, with its value if it has one.
fn serde(attributes: &[Attribute], word: &str) -> Option<Option<String>> {
    let mut found = None;
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("serde")) {
        // A word in a form that this does not parse ends the parse. The words before it are kept.
        let _ = attribute.parse_nested_meta(|meta| {
            let value = match meta.value() {
                Ok(value) => Some(value.parse::<syn::LitStr>()?.value()),
                Err(_) => None,
            };
            if meta.path.is_ident(word) {
                found = Some(value);
            }
            Ok(())
        });
    }
    found
}

fn derives(attributes: &[Attribute], name: &str) -> bool {
    attributes.iter().filter(|attribute| attribute.path().is_ident("derive")).any(|attribute| {
        let mut found = false;
        let _ = attribute.parse_nested_meta(|meta| {
            found |= meta.path.segments.last().is_some_and(|segment| segment.ident == name);
            Ok(())
        });
        found
    })
}
