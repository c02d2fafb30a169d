//! WALinuxAgent's host plug-in, 168.63.129.16 port 32526. It accepts the agent's reports and offers nothing else.
//!
//! `/vmSettings` is 404: the agent reads that as "not supported" and uses the goal state. It treats any other answer,
//! and no answer, as a failure (`hostplugin.py`). There are no extensions, so there is no `/extensionArtifact`.

use std::sync::LazyLock;

use super::super::route_builder::{JSON, RouteBuilder, TEXT};
use super::wireserver::GUARDS;
use crate::http::{Method, Response, StatusCode};
use crate::store::path::HOST_PLUGIN_PORT;
use crate::store::{LiveOutcome, LiveRequest, LiveRoute, Methods};

/// URL for the agent's status, which [`goal_state`](super::wireserver) contains. The agent uses it with and without the
/// plug-in.
pub(super) const STATUS_URL: &str = "http://168.63.129.16:32526/status";
const _: () = assert!(HOST_PLUGIN_PORT == 32_526);

/// Version of the plug-in's interface that the agent requires.
const VERSIONS: &str = r#"["2015-09-01"]"#;

static TAKEN: LazyLock<Response> = LazyLock::new(|| Response::new(StatusCode(201), Some(TEXT), &[], ""));

pub(super) fn render(sheet: &mut RouteBuilder<'_>) {
    let versions = sheet.found(JSON, VERSIONS);
    sheet.guarded("/versions", &*GUARDS, versions);
    let healthy = sheet.found(TEXT, "");
    sheet.guarded("/health", &*GUARDS, healthy);
    for path in ["/status", "/vmAgentLog"] {
        sheet.live(path, Methods::of(&[Method::Put]), &*GUARDS, Reports);
    }
}

/// Accepts reports of the agent and drops them.
#[derive(Debug)]
struct Reports;

impl LiveRoute for Reports {
    fn answer(&self, _: &LiveRequest<'_>) -> LiveOutcome {
        TAKEN.clone().into()
    }

    fn about(&self) -> &'static str {
        "accepted and dropped"
    }
}
