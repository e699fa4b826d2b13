package report

import (
	"math"
	"slices"
	"time"
)

const quantileCount = 21

// Samples are measurements of one thing in one unit.
type Samples []float64

// At returns a percentile by nearest rank.
func (s Samples) At(p float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[max(0, int(math.Ceil(p*float64(len(s))))-1)]
}

// quantiles returns quantileCount values, from the least to the greatest; nil: there are fewer measurements.
func (s Samples) quantiles() []float64 {
	if len(s) < quantileCount {
		return nil
	}
	list := make([]float64, quantileCount)
	for i := range list {
		list[i] = s.At(float64(i) / (quantileCount - 1))
	}
	return list
}

// Mean returns the arithmetic mean.
func (s Samples) Mean() float64 {
	sum := 0.0
	for _, v := range s {
		sum += v
	}
	return sum / float64(len(s))
}

// interval holds the median of all measurements that could have been made, at 95 % confidence, by order statistics:
// see David and Nagaraja, Order Statistics, 3rd edition, 7.1. Fewer than six measurements have none.
func (s Samples) interval() *[2]float64 {
	const least, normal95 = 6, 1.96
	n := float64(len(s))
	if n < least {
		return nil
	}
	reach := normal95 * math.Sqrt(n) / 2
	low, high := max(1, math.Floor(n/2-reach)), min(n, math.Ceil(n/2+reach)+1)
	return &[2]float64{s.At(low / n), s.At(high / n)}
}

// Millis returns a time in milliseconds, in which most figures are.
func Millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
