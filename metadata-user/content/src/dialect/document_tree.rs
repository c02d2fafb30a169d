//! Serves a JSON document and every part of it.

use std::sync::Arc;

use super::document::{JsonDocument, PartKind};
use super::route_builder::{JSON, TEXT};
use crate::http::{Response, StatusCode};
use crate::store::{LiveOutcome, LiveRequest, LiveRoute};

/// Serves a document at its path and each part below it: objects and lists as JSON, scalars as text.
#[derive(Clone, Debug)]
pub(super) struct DocumentTree {
    /// The document, or the response to every request until it exists.
    document: Result<Arc<JsonDocument>, Response>,
    /// Response for the whole document, if it differs.
    whole: Option<Response>,
}

impl DocumentTree {
    /// Serves a document.
    pub(super) fn of(document: JsonDocument) -> Self {
        Self { document: Ok(Arc::new(document)), whole: None }
    }

    /// Serves a document that cannot be rendered yet.
    pub(super) fn unread(response: Response) -> Self {
        Self { document: Err(response), whole: None }
    }

    /// Sets another response for the whole document.
    pub(super) fn with_whole(self, response: Response) -> Self {
        Self { whole: Some(response), ..self }
    }

    fn response(&self, rest: &str) -> Response {
        let document = match (&self.document, &self.whole) {
            (_, Some(whole)) if rest.is_empty() => return whole.clone(),
            (Ok(document), _) => document,
            (Err(response), _) => return response.clone(),
        };
        let node = rest
            .split('/')
            .skip(1)
            .try_fold(document.root(), |node, segment| node.member(|name| name == segment));
        match node {
            Some(node) if node.form() == PartKind::Scalar => {
                Response::new(StatusCode(200), Some(TEXT), &[], node.text())
            }
            Some(node) => Response::new(StatusCode(200), Some(JSON), &[], node.json()),
            None => Response::error(StatusCode(404), &[]),
        }
    }
}

impl LiveRoute for DocumentTree {
    fn answer(&self, call: &LiveRequest<'_>) -> LiveOutcome {
        self.response(call.rest).into()
    }

    fn about(&self) -> &'static str {
        "a JSON document or a part of it"
    }
}

#[cfg(test)]
mod tests {
    use super::{DocumentTree, JsonDocument};
    use crate::store::Interner;
    use serde_json::json;

    #[test]
    fn parts_are_json_or_text_and_absent_ones_are_404() {
        let value = json!({ "a": [{ "b": "x" }], "n": 7, "none": null, "k/k": "slash" });
        let walk = DocumentTree::of(JsonDocument::new(&value, &mut Interner::new()));
        for (rest, status, body) in [
            ("/a", 200, r#"[{"b":"x"}]"#),
            ("/a/0", 200, r#"{"b":"x"}"#),
            ("/a/0/b", 200, "x"),
            ("/n", 200, "7"),
            ("/none", 200, ""),
            ("/a/1", 404, "Not Found\n"),
            ("/a/00", 404, "Not Found\n"),
            ("/a/0/b/x", 404, "Not Found\n"),
            ("/k/k", 404, "Not Found\n"),
        ] {
            let response = walk.response(rest);
            assert_eq!((response.status().0, response.body().to_bytes().as_ref()), (status, body.as_bytes()));
        }
        assert_eq!(walk.response("").body().to_bytes(), value.to_string());
    }
}
