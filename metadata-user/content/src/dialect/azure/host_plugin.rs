//! The host's plug-in of WALinuxAgent, 168.63.129.16 port 32526: it takes what the agent reports, and says that it
//! offers nothing else.
//!
//! `/vmSettings` is 404, which the agent takes for "not supported" and reads the goal state instead; anything else,
//! and no answer at all, it takes for a failure (`hostplugin.py`). There are no extensions, so no `/extensionArtifact`.

use std::sync::LazyLock;

use super::super::sheet::{JSON, Sheet, TEXT};
use super::wireserver::GUARDS;
use crate::http::{Method, Response, Status};
use crate::store::path::HOST_PLUGIN_PORT;
use crate::store::{Call, Live, Methods, Outcome};

/// Where the agent's status goes, as [`goal_state`](super::goal_state) says it. The agent puts it to this address with
/// or without the plug-in's help.
pub(super) const STATUS_URL: &str = "http://168.63.129.16:32526/status";
const _: () = assert!(HOST_PLUGIN_PORT == 32_526);

/// The version of the plug-in's interface that the agent insists on.
const VERSIONS: &str = r#"["2015-09-01"]"#;

static TAKEN: LazyLock<Response> = LazyLock::new(|| Response::new(Status(201), Some(TEXT), &[], ""));

pub(super) fn render(sheet: &mut Sheet<'_>) {
    let versions = sheet.found(JSON, VERSIONS);
    sheet.guarded("/versions", &*GUARDS, versions);
    let healthy = sheet.found(TEXT, "");
    sheet.guarded("/health", &*GUARDS, healthy);
    for path in ["/status", "/vmAgentLog"] {
        sheet.live(path, Methods::of(&[Method::Put]), &*GUARDS, Reports);
    }
}

/// Reports of the agent, which nobody here reads.
#[derive(Debug)]
struct Reports;

impl Live for Reports {
    fn answer(&self, _: &Call<'_>) -> Outcome {
        TAKEN.clone().into()
    }

    fn about(&self) -> &'static str {
        "taken and dropped"
    }
}
