//! The state of the view: the last documents, what is shown, and what to ask next.

use metadata_control::top::{Top, TopQuery, VmPage, VmRow, WORDS_MOST};

/// Number of VMs that the view asks for.
pub const LISTED: usize = 256;

/// What is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Shown {
    /// The node and its VMs.
    #[default]
    Node,
    /// The page of the VMs with this name, MAC or port.
    Vm(String),
    /// The keys.
    Help,
}

/// What to ask the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The node and its VMs.
    pub node: TopQuery,
    /// Also the pages of a VM.
    pub vm: Option<TopQuery>,
}

/// What the agent has answered.
#[derive(Clone, Debug, Default)]
pub struct Documents {
    /// The node and its VMs.
    pub top: Top,
    /// The pages of a VM, with the name that was asked for.
    pub vm: Option<(String, Vec<VmPage>)>,
}

/// The state of the view.
#[derive(Clone, Debug, Default)]
pub struct Screen {
    /// The last answer; `None` before the first.
    pub documents: Option<Documents>,
    /// Why there is no newer answer.
    pub away: Option<String>,
    /// What is shown.
    pub shown: Shown,
    /// Order and filter.
    pub query: TopQuery,
    /// The selected VM, by its place in the list.
    pub selected: usize,
    /// The filter as it is typed.
    pub typed: Option<String>,
}

impl Screen {
    /// A view with an order and a filter.
    #[must_use]
    pub fn new(query: TopQuery) -> Self {
        Self { query, ..Self::default() }
    }

    /// What to ask next.
    #[must_use]
    pub fn asked(&self) -> Asked {
        let vm = match &self.shown {
            Shown::Vm(name) => Some(TopQuery { guest: Some(name.clone()), ..TopQuery::default() }),
            Shown::Node | Shown::Help => None,
        };
        let node =
            TopQuery { limit: Some(self.query.limit.unwrap_or(LISTED)), guest: None, ..self.query.clone() };
        Asked { node, vm }
    }

    /// Takes an answer, or the reason why there is none. The selection stays on its VM.
    pub fn on_answer(&mut self, answer: Result<Documents, String>) {
        match answer {
            Ok(documents) => {
                let chosen = self.chosen().map(|row| (row.port.clone(), row.mac.clone()));
                let is_chosen = |row: &VmRow| {
                    chosen.as_ref().is_some_and(|(port, mac)| (&row.port, &row.mac) == (port, mac))
                };
                // The first line stays selected, so that the newest VM is in view.
                if self.selected > 0
                    && let Some(at) = documents.top.vms.iter().position(is_chosen)
                {
                    self.selected = at;
                }
                self.selected = self.selected.min(documents.top.vms.len().saturating_sub(1));
                self.documents = Some(documents);
                self.away = None;
            }
            Err(reason) => self.away = Some(reason),
        }
    }

    /// The node's last document.
    #[must_use]
    pub fn top(&self) -> Option<&Top> {
        self.documents.as_ref().map(|documents| &documents.top)
    }

    /// The pages of the VM that is shown, if they have arrived.
    #[must_use]
    pub fn pages(&self, name: &str) -> Option<&[VmPage]> {
        let (asked, pages) = self.documents.as_ref()?.vm.as_ref()?;
        (asked == name).then_some(pages)
    }

    /// The selected VM.
    #[must_use]
    pub fn chosen(&self) -> Option<&VmRow> {
        self.top()?.vms.get(self.selected)
    }

    /// Moves the selection.
    pub(crate) fn select(&mut self, at: usize) {
        let most = self.top().map_or(0, |top| top.vms.len().saturating_sub(1));
        self.selected = at.min(most);
    }

    /// Adds a character to the typed filter.
    pub(crate) fn type_in(&mut self, letter: char) {
        if let Some(typed) = &mut self.typed
            && typed.len() + letter.len_utf8() <= WORDS_MOST
        {
            typed.push(letter);
        }
    }
}
