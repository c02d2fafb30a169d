//! `AdmissionReview` of `admission.k8s.io/v1`
//! (<https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/>).
//!
//! Every request is allowed, so that the webhook prevents nobody from creating a VM.
//!
//! We do not use kube's types (`kube::core::admission`): they require fields that we do not read, need another crate
//! for patches, and would add the Kubernetes client to this crate.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::rules::{AdmissionOperation, ObjectChanges};
use metadata_content::parser::{self, ParseError};

const VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";
/// Maximum length of a UID, in bytes; Kubernetes' UIDs have 36.
const UID_MAX: usize = 256;

/// The reason why a review gets no answer.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The body is not JSON, or lacks a field.
    #[error("expected an AdmissionReview of admission.k8s.io/v1, found: {0}")]
    Malformed(#[from] ParseError),
    /// The answer cannot be written.
    #[error("cannot write the answer to an AdmissionReview: {0}")]
    Unwritable(#[from] serde_json::Error),
    /// The body has another version or kind.
    #[error(
        "expected {KIND} of {VERSION}, found {kind} of {version}; `admissionReviewVersions` must be [v1]"
    )]
    Version {
        /// The kind found.
        kind: String,
        /// The version found.
        version: String,
    },
    /// The UID is too long.
    #[error("expected a uid of at most {UID_MAX} bytes, found {0}")]
    Uid(usize),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReviewRequest {
    api_version: String,
    kind: String,
    request: Request,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    uid: String,
    operation: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    object: Value,
    /// The object before an update.
    #[serde(default)]
    old_object: Value,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    api_version: &'static str,
    kind: &'static str,
    response: Response,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    uid: String,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// The answer to a review, and the changes to log.
#[derive(Debug)]
pub struct ReviewResponse {
    /// The body to send.
    pub body: Vec<u8>,
    /// `<namespace>/<name>` of the changed object, and the paths that change.
    pub changed: Option<(String, Vec<String>)>,
}

/// Decides the changes to an object from the operation and its present and previous forms.
pub type DecideChanges = fn(AdmissionOperation, &Value, &Value) -> ObjectChanges;

/// Answers a review.
///
/// # Errors
/// [`ReviewError`]: the body is not a review.
pub fn answer(body: &[u8], judge: DecideChanges) -> Result<ReviewResponse, ReviewError> {
    let ReviewRequest { api_version: version, kind, request } = parser::json(body)?;
    if version != VERSION || kind != KIND {
        let short = |text: String| text.chars().take(64).collect();
        return Err(ReviewError::Version { kind: short(kind), version: short(version) });
    }
    if request.uid.len() > UID_MAX {
        return Err(ReviewError::Uid(request.uid.len()));
    }
    let judged = match &*request.operation {
        "CREATE" => judge(AdmissionOperation::Create, &request.object, &Value::Null),
        "UPDATE" => judge(AdmissionOperation::Update, &request.object, &request.old_object),
        _ => ObjectChanges::default(),
    };
    let patch = (!judged.changes.is_empty()).then(|| serde_json::to_vec(&judged.changes)).transpose()?;
    let response = Response {
        uid: request.uid,
        allowed: true,
        patch_type: patch.is_some().then_some("JSONPatch"),
        patch: patch.map(|patch| STANDARD.encode(patch)),
        warnings: judged.warnings,
    };
    let paths: Vec<_> = judged.changes.into_iter().map(|change| change.path).collect();
    // A new pod may have only a prefix from which its name will be generated.
    let generated = request.object["metadata"]["generateName"].as_str().unwrap_or_default();
    let name = if request.name.is_empty() { generated } else { &*request.name };
    let changed = (!paths.is_empty()).then(|| (format!("{}/{name}", request.namespace), paths));
    let body = serde_json::to_vec(&Answer { api_version: VERSION, kind: KIND, response })?;
    Ok(ReviewResponse { body, changed })
}

#[cfg(test)]
mod tests {
    use super::{ReviewError, ReviewResponse, STANDARD};
    use crate::verbs::webhook::rules::judge;
    use base64::Engine as _;
    use serde_json::{Value, json};

    fn answer(body: &[u8]) -> Result<ReviewResponse, ReviewError> {
        super::answer(body, judge)
    }

    fn review(operation: &str, annotations: &Value) -> Value {
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "operation": operation, "namespace": "n", "name": "vm-a",
            "object": {"spec": {"template": {"metadata": {"annotations": annotations}, "spec": {"domain": {}}}}},
            "oldObject": null, "dryRun": false}})
    }

    #[test]
    fn the_answer_has_the_questions_uid_and_a_patch() {
        let question = review("CREATE", &json!({"imds.kubevirt.io/enabled": "true"}));
        let reviewed = answer(question.to_string().as_bytes()).expect("an answer");
        let said: Value = serde_json::from_slice(&reviewed.body).expect("JSON");
        assert_eq!(said["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(said["response"]["uid"], "705ab4f5-6393-11e8-b7cc-42010a800002");
        assert_eq!(
            (&said["response"]["allowed"], &said["response"]["patchType"]),
            (&json!(true), &json!("JSONPatch"))
        );
        let patch = STANDARD.decode(said["response"]["patch"].as_str().expect("a patch")).expect("base64");
        let patch: Value = serde_json::from_slice(&patch).expect("JSON");
        assert_eq!(patch[0]["op"], "add");
        assert_eq!(reviewed.changed.expect("changed").0, "n/vm-a");
    }

    #[test]
    fn a_request_without_changes_is_allowed_without_a_patch() {
        for (operation, annotations) in [
            ("CREATE", json!({})),
            ("DELETE", json!({"imds.kubevirt.io/enabled": "true"})),
            ("UPDATE", json!({"imds.kubevirt.io/enabled": "true"})),
        ] {
            let reviewed = answer(review(operation, &annotations).to_string().as_bytes()).expect("an answer");
            let said: Value = serde_json::from_slice(&reviewed.body).expect("JSON");
            let response = said["response"].as_object().expect("an object");
            assert_eq!(response["allowed"], json!(true), "{operation}");
            assert!(!response.contains_key("patch") && !response.contains_key("patchType"), "{operation}");
            assert!(reviewed.changed.is_none(), "{operation}");
        }
    }

    #[test]
    fn other_versions_and_malformed_reviews_are_refused() {
        let mut beta = review("CREATE", &json!({}));
        beta["apiVersion"] = json!("admission.k8s.io/v1beta1");
        let refused = answer(beta.to_string().as_bytes()).expect_err("not v1");
        assert!(matches!(refused, ReviewError::Version { .. }), "{refused}");
        let mut long = review("CREATE", &json!({}));
        long["request"]["uid"] = json!("u".repeat(257));
        assert!(matches!(answer(long.to_string().as_bytes()), Err(ReviewError::Uid(257))));
        for other in
            ["", "{}", "[]", "null", r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}"#]
        {
            let refused = answer(other.as_bytes()).expect_err(other);
            assert!(matches!(refused, ReviewError::Malformed(_)), "{other}: {refused}");
        }
    }
}
