//! The site of a case: taps in a namespace of their own, a record for each guest, and the agent.

use super::Job;
use crate::storm::crawl::Dialect;
use crate::storm::guest::{Expected, Plan, TAP_GROUP, tap_name};
use crate::storm::plan::Case;
use anyhow::{Context as _, Result};
use std::fmt::Write as _;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use support::agent::{Agent, PortArgument, arguments};
use support::netns::Namespace;
use support::tap::{Shape, Tap};

/// Turns off the limits on what a port may send. The records raise the limit of requests.
const NO_LIMITS: &str = "limits: {frames_per_second: 0, connections_per_second: 0}\n";

/// The namespace with its taps, and the files of the agent and its guests.
pub(super) struct Site {
    agent: PathBuf,
    configuration: PathBuf,
    pub(super) taps: Vec<Arc<Tap>>,
    /// One request, for user-data, and the answer to each guest.
    pub(super) plan: Plan,
    case: Case,
    ns: Namespace,
}

impl Site {
    /// Makes taps and records.
    pub(super) fn new(job: &Job, agent: &Path, configuration: &str) -> Result<Self> {
        let case = Case::lay_out(Dialect::Nocloud, job.guests, job.bytes)?;
        let crawl = Dialect::Nocloud.crawl()?;
        let at = crawl.iter().position(|asked| asked.path.ends_with("/user-data"));
        let at = at.context("the crawl has no request for user-data")?;
        let mut plan: Plan = serde_json::from_reader(BufReader::new(File::open(case.plan())?))?;
        plan.requests = vec![plan.requests.swap_remove(at)];
        plan.guests.iter_mut().for_each(|guest| guest.answers = vec![guest.answers[at]]);
        let file = case.plan().with_file_name("agent.yaml");
        std::fs::write(&file, format!("{NO_LIMITS}{configuration}"))?;
        let ns = Namespace::new("haul")?;
        // Without IPv6 the node itself sends no frames on the taps.
        ns.sysctl("ipv6/conf/default/disable_ipv6", "1")?;
        let mut lines = String::new();
        let mut taps = Vec::new();
        for number in 0..job.guests {
            let name = tap_name(number);
            writeln!(lines, "link set {name} group {TAP_GROUP} up")?;
            taps.push(Arc::new(Tap::create(&ns, &name, Shape::virtio())?));
        }
        ns.ip_batch(&lines)?;
        Ok(Self { agent: agent.to_owned(), configuration: file, taps, plan, case, ns })
    }

    /// Starts the agent.
    pub(super) fn serve(&self) -> Result<Agent<'_>> {
        let ports = self.case.tenants.iter().map(|tenant| PortArgument::new(&tenant.tap, tenant.mac));
        let mut words = arguments(&self.case.records(), &ports.collect::<Vec<_>>());
        words.extend(["--config".into(), self.configuration.clone().into()]);
        Agent::start_binary(&self.agent, &self.ns, words)
    }

    /// Returns the request with `Connection: close` in place of `keep-alive`.
    pub(super) fn closing_request(&self) -> String {
        self.plan.requests[0].replace("Connection: keep-alive", "Connection: close")
    }

    /// Returns the answer that a guest must get.
    pub(super) fn expected(&self, number: usize) -> &Expected {
        &self.plan.guests[number].answers[0]
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // All taps are deleted in one step. Each tap that closes by its descriptor waits for a grace period of its own.
        if let Err(error) = self.ns.ip(&format!("link del group {TAP_GROUP}")) {
            eprintln!("cannot delete the taps of {} in one step: {error:#}", self.ns.name());
        }
    }
}
