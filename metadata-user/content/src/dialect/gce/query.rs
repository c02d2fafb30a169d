//! Query parameters, and the form of the answer.

use std::time::Duration;

use super::super::sheet::JSON;
use super::PLAIN;
use super::view::{Shape, View};
use crate::http::Body;

/// `alt`: the requested form, if it is not the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Alt {
    Json,
    Text,
}

/// Query parameters. Unknown and malformed ones are ignored.
#[derive(Debug, Default)]
pub(super) struct Query {
    alt: Option<Alt>,
    pub(super) recursive: bool,
    pub(super) wait_for_change: bool,
    pub(super) last_etag: Option<String>,
    pub(super) timeout: Option<Duration>,
    pub(super) audience: Option<String>,
    /// `format=full`: the token says more of the VM.
    pub(super) full: bool,
}

impl Query {
    pub(super) fn parse(text: &str) -> Self {
        let mut query = Self::default();
        for (name, value) in form_urlencoded::parse(text.as_bytes()) {
            // Chef's ohai appends a slash to its URL, and so to this value.
            let yes = value.trim_end_matches('/').eq_ignore_ascii_case("true");
            match &*name {
                "alt" if value.eq_ignore_ascii_case("json") => query.alt = Some(Alt::Json),
                "alt" if value.eq_ignore_ascii_case("text") => query.alt = Some(Alt::Text),
                "recursive" => query.recursive = yes,
                "wait_for_change" => query.wait_for_change = yes,
                "last_etag" => query.last_etag = Some(value.into_owned()),
                "timeout_sec" => query.timeout = value.parse().ok().map(Duration::from_secs),
                "format" => query.full = value.eq_ignore_ascii_case("full"),
                "audience" => query.audience = Some(value.into_owned()),
                _ => {}
            }
        }
        query
    }

    /// Returns content type and body of a node.
    pub(super) fn body(&self, view: &impl View) -> (&'static str, Body) {
        let json = self.alt == Some(Alt::Json);
        let whole = self.recursive && self.alt != Some(Alt::Text);
        match view.shape() {
            Shape::Directory if whole => (JSON, view.json()),
            Shape::Directory if self.recursive => (PLAIN, flat(view).into()),
            Shape::Directory if json => (JSON, serde_json::Value::from(names(view)).to_string().into()),
            Shape::Directory => (PLAIN, lines(names(view)).into()),
            Shape::List if json || whole => (JSON, view.json()),
            Shape::Array if self.alt != Some(Alt::Text) => (JSON, view.json()),
            Shape::List | Shape::Array => (PLAIN, lines(items(view)).into()),
            Shape::Leaf if json => (JSON, view.json()),
            Shape::Leaf => (PLAIN, view.text()),
        }
    }
}

/// Lists a directory. Names of directories end with a slash.
fn names(view: &impl View) -> Vec<String> {
    let listed = |(name, child)| {
        let slash = if View::shape(&child) == Shape::Directory { "/" } else { "" };
        format!("{name}{slash}")
    };
    let mut names: Vec<String> = view.children().into_iter().map(listed).collect();
    let unlisted = view.computed();
    if !unlisted.is_empty() {
        names.extend(unlisted.iter().map(ToString::to_string));
        names.sort();
    }
    names
}

fn items(view: &impl View) -> Vec<String> {
    view.children().iter().map(|(_, item)| plain(item)).collect()
}

fn plain(view: &impl View) -> String {
    String::from_utf8_lossy(&view.text().to_bytes()).into_owned()
}

fn lines(lines: Vec<String>) -> String {
    lines.into_iter().map(|line| line + "\n").collect()
}

/// Writes a whole directory as text, one line per value: path, space, value.
fn flat(view: &impl View) -> String {
    fn write(view: &impl View, path: &str, text: &mut String) {
        for (name, child) in view.children() {
            let path = if path.is_empty() { name } else { format!("{path}/{name}") };
            match child.shape() {
                Shape::Directory => write(&child, &path, text),
                Shape::List | Shape::Array => {
                    items(&child).iter().for_each(|item| *text += &format!("{path} {item}\n"))
                }
                Shape::Leaf => *text += &format!("{path} {}\n", plain(&child)),
            }
        }
    }
    let mut text = String::new();
    write(view, "", &mut text);
    text
}
