//! Reports of benchmarks: ratios of operations that ran alternately.

pub(crate) mod alternating;

/// Goal of a measurement.
pub(crate) enum Target {
    /// Upper limit of hmem's figure divided by the reference figure.
    Ratio(f64),
    /// Upper limit of hmem's figure, in nanoseconds.
    Nanoseconds(f64),
    /// There is no goal: the report only shows the figures.
    Unlimited,
}

impl Target {
    /// Returns the goal as text, and true if the measurement meets the goal. `ours` is hmem's time
    /// in nanoseconds, and `ratio` is `ours` divided by the reference time.
    fn check(&self, ours: f64, ratio: f64) -> (String, bool) {
        match *self {
            Self::Ratio(most) => (format!("{most:.2}"), ratio <= most),
            Self::Nanoseconds(most) => (format!("{most:.0} ns"), ours <= most),
            Self::Unlimited => ("-".to_owned(), true),
        }
    }
}
